"""From a recipe's `[data]` section, or a worker's own files, to shards of sequences on disk.

The result is a function of the files' names and contents, the settings, the tokenizer and the seed, and is kept in a
cache folder under a name made of all of these. It appears there whole or not at all, so any number of processes may
prepare the same data at once.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from potluck.data.config import DataConfig, ReadOptions, TokenizerConfig
from potluck.data.epoch import permutation
from potluck.data.packing import (
    Division,
    TokenDocuments,
    divide,
    divided_texts,
    num_sequences_in,
    pack,
    pack_records,
    tokenise,
)
from potluck.data.prepared import PreparedData, facts_of, open_prepared
from potluck.data.readers import Reader, ReadReport
from potluck.data.records import RecordForm, Records
from potluck.data.sources import Source, corpus_digest, find_sources
from potluck.data.token_arrays import check_vocabulary, document_stops, highest_token, open_tokens, token_type_for
from potluck.data.tokenizer import TextTokenizer, copy_tokenizer, pack_tokenizer, train_bpe
from potluck.storage.digest import digest_bytes
from potluck.types.disk import full_disk_named
from potluck.types.errors import DataError
from potluck.types.ids import Digest

_version = 2
_max_training_chars = 200_000_000  # of text that a tokenizer is trained on; its memory grows with it
_block_sequences = 64  # arrays of tokens without an end-of-text token: this many sequences are a document


@dataclass(frozen=True, kw_only=True)
class _Job:
    """All that a result depends on."""

    sources: Sequence[Source]
    held_out: Sequence[Source]
    unknown: Sequence[Path]
    options: ReadOptions
    seed: int
    tokenizer: TokenizerConfig
    tokenizer_dir: Path | None
    vocab_size: int
    tell: Callable[[str], None]

    @property
    def is_tokens(self) -> bool:
        return self.sources[0].kind == "tokens"

    def reader(self, sources: Sequence[Source]) -> Reader:
        options = self.options
        unknown = self.unknown if sources is self.sources else ()
        return Reader(sources, options.text_field, options.max_bytes if sources is self.sources else 0, unknown)


def prepare_shared(
    config: DataConfig,
    *,
    seed: int,
    base: Path,
    cache_dir: Path,
    model_tokenizer: Path | None = None,
    vocab_size: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> PreparedData:
    """The coordinator's data. Blocks for seconds or more: call it in an executor.

    `base` is what relative paths are relative to, `model_tokenizer` the directory that `tokenizer = "model"` means,
    `vocab_size` the model's, if it is known: tokens must fit it, and arrays of tokens without a tokenizer need it.
    `tell` hears what is being done.
    Raises DataError, and ResourceError if the disk is full.
    """
    sources, unknown = find_sources(config.paths, format=config.format, base=base)
    held_out: list[Source] = []
    if isinstance(config.validation, tuple):
        held_out, _ = find_sources(config.validation, format=config.format, base=base)
        taken = {s.path.resolve() for s in held_out}
        sources = [s for s in sources if s.path.resolve() not in taken]
        if not sources:
            raise DataError("every data file is in `data.validation`, so none is left to train on; name others")
    named = config.tokenizer.path
    job = _Job(
        sources=sources,
        held_out=held_out,
        unknown=unknown,
        options=config.read_options(),
        seed=seed,
        tokenizer=config.tokenizer,
        tokenizer_dir=base / Path(named).expanduser() if named else model_tokenizer,
        vocab_size=vocab_size,
        tell=tell,
    )
    return _prepare(job, cache_dir)


def prepare_private(
    paths: Sequence[str | Path],
    options: ReadOptions,
    *,
    seed: int,
    base: Path,
    cache_dir: Path,
    tokenizer_dir: Path | None,
    vocab_size: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> PreparedData:
    """A worker's own data, prepared on its own machine. As `prepare_shared`."""
    sources, unknown = find_sources(paths, format=options.format, base=base)
    job = _Job(
        sources=sources,
        held_out=(),
        unknown=unknown,
        options=options,
        seed=seed,
        tokenizer=TokenizerConfig(),
        tokenizer_dir=tokenizer_dir,
        vocab_size=vocab_size,
        tell=tell,
    )
    return _prepare(job, cache_dir)


def _prepare(job: _Job, cache_dir: Path) -> PreparedData:
    if not job.is_tokens and not job.tokenizer.train and job.tokenizer_dir is None:
        raise DataError(
            "text needs a tokenizer and this model comes without one; "
            'set `data.tokenizer = { train = "bpe", vocab_size = 4096 }` or give a `path`'
        )
    job.tell("reading the data")
    corpus = corpus_digest(job.sources)
    digest = _digest(job, corpus)
    final = cache_dir / f"data-{digest.split(':')[-1][:32]}"
    data = open_prepared(final, digest) or _made(job, cache_dir, final, {"digest": digest, "corpus_digest": corpus})
    if job.vocab_size and data.highest_token >= job.vocab_size:
        raise DataError(
            f"the data holds token {data.highest_token} and the model's vocabulary has {job.vocab_size:,} entries; "
            "use the model's own tokenizer or set its `vocab_size`"
        )
    return data


def _made(job: _Job, cache_dir: Path, final: Path, names: dict[str, Any]) -> PreparedData:
    with full_disk_named(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=cache_dir, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / "data"
            made.mkdir()
            facts = {**_make(job, made, Path(scratch)), **names, "seq_len": job.options.seq_len}
            (made / "prepared.json").write_text(json.dumps(facts), encoding="utf-8")
            return _publish(made, final, names["digest"])


def _digest(job: _Job, corpus: Digest) -> Digest:
    if job.tokenizer.train:
        # Version included: training may change between versions of the library.
        tokenizer = f"bpe/{job.tokenizer.vocab_size}/{tokenizers.__version__}"
    elif job.tokenizer_dir is not None:
        tokenizer = str(digest_bytes(_packed(job.tokenizer_dir)))
        if job.options.rows_per_record:
            tokenizer += f"/{version('transformers')}"  # which renders chat templates
    else:
        tokenizer = f"none/{job.vocab_size}"
    held_out = corpus_digest(job.held_out) if job.held_out else ""
    return digest_bytes(
        json.dumps([_version, corpus, held_out, job.options.model_dump(), job.seed, tokenizer]).encode()
    )


def _packed(folder: Path) -> bytes:
    """What a tokenizer's directory holds; the whole of it if it is in an older form."""
    if (folder / "tokenizer.json").is_file() or not folder.is_dir():
        return pack_tokenizer(folder)
    names = sorted(p for p in folder.iterdir() if p.is_file() and p.stat().st_size < 64 << 20)
    return b"".join(p.name.encode() + p.read_bytes() for p in names)


def _make(job: _Job, folder: Path, scratch: Path) -> dict[str, Any]:
    """Everything but the publication: writes tokenizer and shards to `folder`, returns what prepared.json says."""
    if job.options.rows_per_record:
        return _from_records(job, folder, scratch)
    if job.is_tokens:
        training, validation, vocab_size, report = _from_arrays(job, folder)
    else:
        training, validation, vocab_size, report = _from_text(job, folder, scratch)
    seq_len = job.options.seq_len
    num_tokens, num_validation = int(training.lengths().sum()), int(validation.lengths().sum())
    if not num_sequences_in(num_tokens, seq_len):
        raise DataError(
            f"the data holds {num_tokens:,} training tokens and one sequence needs {seq_len + 1:,}; "
            "add text or lower `data.seq_len`"
        )
    wanted = job.held_out or job.options.validation > 0
    if wanted and not num_sequences_in(num_validation, seq_len):
        raise DataError(
            f"the data holds {num_validation:,} tokens for validation and one sequence needs {seq_len + 1:,}; "
            "raise `data.validation`, add text or lower `data.seq_len`"
        )
    job.tell("packing sequences")
    token_type = token_type_for(vocab_size)
    order = permutation(f"{job.seed}/documents", len(training))
    shards = pack(training, map(int, order), seq_len=seq_len, token_type=token_type, folder=folder / "training")
    held_out = pack(
        validation, range(len(validation)), seq_len=seq_len, token_type=token_type, folder=folder / "validation"
    )
    kept = sum(sum(s.num_sequences for s in part) * seq_len + 1 for part in (shards, held_out) if part)
    arrays = (*training.arrays, *validation.arrays)
    return facts_of(
        shards,
        held_out,
        report,
        vocab_size=vocab_size,
        highest_token=max((highest_token(folder, array) for array in arrays), default=0),
        num_documents=len(training),
        num_validation_documents=len(validation),
        num_tokens=num_tokens,
        num_validation_tokens=num_validation,
        num_dropped_tokens=num_tokens + num_validation - kept,
    )


def _from_records(job: _Job, folder: Path, scratch: Path) -> dict[str, Any]:
    assert job.tokenizer_dir is not None
    copy_tokenizer(job.tokenizer_dir, folder / "tokenizer")
    form = RecordForm(job.options, folder / "tokenizer")
    job.tell("tokenising")
    reader, given = job.reader(job.sources), job.reader(job.held_out)
    records, report = Records.collect(reader.records(form), scratch / "records.bin"), reader.report()
    everything = np.arange(len(records.rows))
    if job.held_out:
        validation, training = Records.collect(given.records(form), scratch / "validation.bin"), everything
        held, report = np.arange(len(validation.rows)), report.joined(given.report())
    else:
        is_held = divide([1] * len(everything), job.options.validation, job.seed).held_out_records(len(everything))
        validation, training, held = records, everything[~is_held], everything[is_held]
    if not len(training) or (not len(held) and job.options.validation > 0):
        what = "validation" if len(training) else "training"
        raise DataError(f"the data holds {report.num_documents:,} records and none is left for {what}; add some")
    job.tell("packing sequences")
    order = training[permutation(f"{job.seed}/documents", len(training))]
    return facts_of(
        pack_records(records.rows, order, folder=folder / "training"),
        pack_records(validation.rows, held, folder=folder / "validation"),
        replace(report, num_cut=form.num_cut),
        vocab_size=form.tokenizer.vocab_size,
        highest_token=max(records.highest_token, validation.highest_token),
        num_documents=len(training),
        num_validation_documents=len(held),
        num_tokens=int(records.num_predicted[training].sum()),
        num_validation_tokens=int(validation.num_predicted[held].sum()),
        num_dropped_tokens=0,
    )


def _from_text(job: _Job, folder: Path, scratch: Path) -> tuple[TokenDocuments, TokenDocuments, int, ReadReport]:
    reader = job.reader(job.sources)
    lengths = [len(text) for text in reader.documents()]
    division = Division() if job.held_out else divide(lengths, job.options.validation, job.seed)

    def texts(held_out: bool) -> Iterator[str]:
        return (text for text, held in divided_texts(reader.documents(), division) if held == held_out)

    if job.tokenizer.train:
        job.tell("training the tokenizer")
        tokenizer = train_bpe(_sample(texts(False), sum(lengths)), job.tokenizer.vocab_size, folder / "tokenizer")
    else:
        assert job.tokenizer_dir is not None
        tokenizer = copy_tokenizer(job.tokenizer_dir, folder / "tokenizer")
    job.tell("tokenising")
    training = tokenise(texts(False), tokenizer, scratch / "training.bin")
    held_out = job.reader(job.held_out)
    kept_out = held_out.documents() if job.held_out else texts(True)
    validation = tokenise(kept_out, tokenizer, scratch / "validation.bin")
    report = reader.report().joined(held_out.report()) if job.held_out else reader.report()
    return training, validation, tokenizer.vocab_size, report


def _sample(texts: Iterator[str], num_chars: int) -> Iterator[str]:
    """Every k-th text, so that about `_max_training_chars` are left."""
    step = max(1, -(-num_chars // _max_training_chars))
    return (text for number, text in enumerate(texts) if number % step == 0)


def _from_arrays(job: _Job, folder: Path) -> tuple[TokenDocuments, TokenDocuments, int, ReadReport]:
    tokenizer: TextTokenizer | None = None
    if job.tokenizer_dir is not None:
        tokenizer = copy_tokenizer(job.tokenizer_dir, folder / "tokenizer")
    vocab_size = tokenizer.vocab_size if tokenizer else job.vocab_size
    if not vocab_size:
        raise DataError("arrays of tokens need a tokenizer or a model that tells the size of the vocabulary; name one")
    eos_id = tokenizer.eos_id if tokenizer else -1

    def documents(sources: Sequence[Source]) -> TokenDocuments:
        arrays = [open_tokens(s.path, job.options.token_type) for s in sources]
        for source, array in zip(sources, arrays, strict=True):
            check_vocabulary(source.path, highest_token(source.path, array), vocab_size)
        block = _block_sequences * job.options.seq_len
        return TokenDocuments.of(arrays, [document_stops(array, eos_id, block) for array in arrays])

    whole = documents(job.sources)
    report = ReadReport(num_documents=len(whole), num_bytes=sum(s.path.stat().st_size for s in job.sources))
    if job.held_out:
        return whole, documents(job.held_out), vocab_size, report
    training, validation = whole.divided(divide(whole.lengths().tolist(), job.options.validation, job.seed))
    return training, validation, vocab_size, report


def _publish(made: Path, final: Path, digest: Digest) -> PreparedData:
    try:
        os.rename(made, final)
    except OSError:
        ready = open_prepared(final, digest)  # another process was quicker
        if ready is not None:
            return ready
        shutil.rmtree(final, ignore_errors=True)  # what was there is not whole
        os.rename(made, final)
    ready = open_prepared(final, digest)
    assert ready is not None
    return ready
