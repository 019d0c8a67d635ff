"""The `[data]` section of a recipe, and the part of it that a worker reads its own files by."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Format = Literal["auto", "text", "jsonl", "parquet", "datasets", "tokens", "instruct", "chat", "preference"]
TokenType = Literal["uint16", "uint32", "int32"]

RECORD_FIELDS: dict[str, tuple[str, ...]] = {
    "instruct": ("instruction", "input", "output"),
    "chat": ("messages",),
    "preference": ("prompt", "chosen", "rejected"),
}
"""Formats whose data is records with answers (data/records.py), and the fields of a record."""


def rows_per_record(format: object) -> int:
    """Rows of tokens that a record of this format becomes; 0 for running text, which is cut where it comes."""
    if format not in tuple(RECORD_FIELDS):
        return 0
    return 2 if format == "preference" else 1


class TokenizerConfig(BaseModel):
    """Where the tokenizer comes from: the model (nothing set), training, or a directory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train: Literal["bpe"] | None = Field(
        default=None, description="train a byte-level BPE tokenizer on the shared data"
    )
    vocab_size: int = Field(default=4096, ge=257, le=1 << 20, description="entries of a trained tokenizer")
    path: str | None = Field(default=None, description="directory of a tokenizer in Hugging Face form")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {} if value == "model" else value

    @model_validator(mode="after")
    def _one_source(self) -> TokenizerConfig:
        if self.train and self.path:
            raise ValueError("give `train` or `path`, not both")
        return self


class ReadOptions(BaseModel):
    """How files become documents and sequences: all that a worker needs to read files of its own."""

    model_config = ConfigDict(extra="ignore", frozen=True)  # a later minor version may add fields

    format: Format = "auto"
    text_field: str = Field(default="text", min_length=1, max_length=200)
    fields: dict[str, str] = Field(default={}, max_length=8)
    token_type: TokenType = "uint16"
    seq_len: int = Field(ge=1, le=1 << 20)
    validation: float = Field(default=0.05, ge=0, lt=1)
    max_bytes: int = Field(default=0, ge=0)

    @property
    def rows_per_record(self) -> int:
        return rows_per_record(self.format)


class DataConfig(BaseModel):
    """What a run trains on. Exactly one of `shared`, `private` and `listed` is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shared: str | tuple[str, ...] | None = Field(
        default=None,
        description="the coordinator's data, dealt to the workers: `python-stdlib`, a file, a folder, a saved "
        "`datasets` directory, or a list of paths and globs",
    )
    private: bool = Field(
        default=False, description="every worker reads files of its own (`join --data`), which never leave it"
    )
    listed: str | None = Field(default=None, description="a manifest of files of which every worker has its own copy")
    format: Format = Field(
        default="auto",
        description="how files are read; `auto` goes by their names; instruct, chat and preference are records",
    )
    text_field: str = Field(
        default="text", min_length=1, max_length=200, description="field or column that holds the text of a record"
    )
    fields: dict[str, str] = Field(
        default={}, description='names of a record\'s fields where they are others: `{ output = "answer" }`'
    )
    token_type: TokenType = Field(default="uint16", description="what a raw `.bin` file of tokens holds")
    tokenizer: TokenizerConfig = Field(
        default=TokenizerConfig(), description='`"model"` for the model\'s own, or a table with `train` or `path`'
    )
    seq_len: int = Field(default=256, ge=1, le=1 << 20, description="tokens in a training sequence")
    validation: float | tuple[str, ...] = Field(
        default=0.05, description="share of the text held out by whole documents, or a list of files that are held out"
    )
    max_bytes: int = Field(default=0, ge=0, description="stop reading after this many bytes of text; 0 for no limit")

    @model_validator(mode="after")
    def _one_access(self) -> DataConfig:
        num_set = sum((self.shared is not None, self.private, self.listed is not None))
        if num_set != 1:
            raise ValueError(f"give exactly one of `shared`, `private` and `listed`; {num_set} are given")
        if not isinstance(self.validation, tuple) and not 0 <= self.validation < 1:
            raise ValueError(f"`validation` is {self.validation} and must be at least 0 and less than 1")
        if self.shared is None and isinstance(self.validation, tuple):
            raise ValueError("a list of `validation` files goes with `shared` data only")
        if self.shared is None and self.tokenizer.train:
            raise ValueError("a tokenizer can be trained on `shared` data only; give `tokenizer.path`")
        self._check_records()
        return self

    def _check_records(self) -> None:
        known = RECORD_FIELDS.get(self.format, ())
        if strange := [name for name in self.fields if name not in known]:
            have = f"has the fields {', '.join(known)}" if known else "has no fields to name"
            raise ValueError(f"`fields` names {strange[0]!r} and format {self.format!r} {have}")
        if known and self.tokenizer.train:
            raise ValueError(f"a tokenizer is trained on text, not on format {self.format!r}; give `tokenizer.path`")
        if known and self.listed is not None:
            raise ValueError(f"format {self.format!r} goes with `shared` and `private` data; `listed` files are text")

    @property
    def access(self) -> Literal["shared", "private", "listed"]:
        if self.private:
            return "private"
        return "listed" if self.listed is not None else "shared"

    @property
    def paths(self) -> tuple[str, ...]:
        """What `shared` names."""
        if self.shared is None:
            return ()
        return (self.shared,) if isinstance(self.shared, str) else self.shared

    def read_options(self) -> ReadOptions:
        """What a worker is told."""
        return ReadOptions(
            format=self.format,
            text_field=self.text_field,
            fields=self.fields,
            token_type=self.token_type,
            seq_len=self.seq_len,
            validation=0.0 if isinstance(self.validation, tuple) else self.validation,
            max_bytes=self.max_bytes,
        )
