"""The output file of ``serve-file``: JSON lines, which a later run may continue."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import typer

from trt_kvcache._util.json_text import JSONTextError, parse_json
from trt_kvcache.cli.prompt_file import FilePrompt
from trt_kvcache.errors import ConfigError


class AnswerFile:
    """An output file, as it was before this run."""

    def __init__(self, path: Path, *, continued: bool, overwrite: bool) -> None:
        self.path = path
        self.finished: dict[int, dict[str, Any]] = {}  # answers that are kept, by the index of their prompt
        self._is_stdout = str(path) == "-"
        self._kept_nbytes = 0
        if continued and (overwrite or self._is_stdout):
            raise typer.BadParameter(f"expected a file without {'--overwrite' if overwrite else '-o -'}.", param_hint="--continue")
        if self._is_stdout or overwrite or not path.is_file() or not path.stat().st_size:
            return
        if not continued:
            raise typer.BadParameter(f"{path} has answers already. Give --continue to keep them, or --overwrite.", param_hint="--output")
        self._read()

    def __str__(self) -> str:
        return "stdout" if self._is_stdout else str(self.path)

    def _read(self) -> None:
        """Read the existing answers. A last line without a line feed was cut off and is ignored."""
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                return
            try:
                answer = parse_json(line)
                self.finished[answer["index"]] = answer
            except (JSONTextError, TypeError, KeyError):
                text = line.decode(errors="replace").strip()
                raise ConfigError(f"{self.path}:{number}: expected an answer of serve-file, got {text:.60}. Nothing was changed.") from None
            self._kept_nbytes += len(line)

    def check(self, prompts_path: Path, prompts: Sequence[FilePrompt]) -> None:
        """Raise ConfigError if an existing answer belongs to another prompt."""
        for index, answer in self.finished.items():
            belongs = isinstance(index, int) and 0 <= index < len(prompts)
            if not belongs or any(answer.get(name) != value for name, value in prompts[index].metadata.items()):
                raise ConfigError(f"{self.path}: answer {index}: there is no such prompt in {prompts_path}. Nothing was changed.")

    @contextmanager
    def open(self) -> Iterator[TextIO]:
        """Yield the file for the missing answers."""
        if self._is_stdout:
            yield sys.stdout
            return
        try:
            with self.path.open("r+" if self._kept_nbytes else "w", encoding="utf-8", newline="\n") as file:
                if self._kept_nbytes:
                    file.truncate(self._kept_nbytes)
                    file.seek(self._kept_nbytes)
                yield file
        except OSError as error:
            if error.filename is not None or error.errno is None:
                raise
            raise OSError(error.errno, error.strerror, str(self.path)) from error  # a failed write has no file name
