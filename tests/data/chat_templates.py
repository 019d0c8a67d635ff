"""Tokenizers with chat templates of the usual kinds, with and without marks of what an answer is."""

from pathlib import Path

from tokenizers import Tokenizer

from potluck.data.tokenizer import TextTokenizer, train_bpe

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_llama_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set first = '<<SYS>>\n' + "
    "messages[0]['content'] + '\n<</SYS>>\n\n' %}{% else %}{% set turns = messages %}{% set first = '' %}{% endif %}"
    "{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (first if loop.first else '') + message['content'] + ' [/INST]' }}{% else %}"
    "BEGIN{{ ' ' + message['content'] + ' ' + eos_token }}END{% endif %}{% endfor %}"
)
LLAMA_2 = _llama_2.replace("BEGIN", "").replace("END", "")
LLAMA_2_MARKED = _llama_2.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
TEMPLATES = {  # with what stands before and after an answer's text in its tokens
    "chatml": (CHATML, "", "<|im_end|>\n"),
    "chatml-marked": (CHATML_MARKED, "", "<|im_end|>"),
    "llama-2": (LLAMA_2, " ", " <|endoftext|>"),
    "llama-2-marked": (LLAMA_2_MARKED, " ", " <|endoftext|>"),
}
MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
VOCAB_SIZE = 320


def save_chat_tokenizer(folder: Path, template: str | None) -> TextTokenizer:
    """Byte-level BPE of at most `VOCAB_SIZE` tokens."""
    text = "user assistant system\n how are you\n\n    return fine, thanks </s> [INST] [/INST]\n\n### Response:\n"
    train_bpe(iter([text] * 9), VOCAB_SIZE - 3, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKS[:2]))
    tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return TextTokenizer.open(folder)
