"""Reading a checkpoint's JSON and text files with errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relaxpack.errors import CheckpointError


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name} is not UTF-8 text (byte {error.start}); the file is damaged") from None


def read_object(path: Path, required: bool = True) -> dict[str, Any]:
    """The JSON object in `path`; an absent file is {} unless `required`."""
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path.parent.name} has no {path.name}; give a complete Hugging Face folder or a "
                                  ".gguf file")
        return {}
    return parse_object(read_text(path), path.name)


def parse_object(text: str, name: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises CheckpointError, naming `name`, for anything else."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{name} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}; "
                              "incomplete download?") from None
    except (RecursionError, ValueError) as error:   # nested without end, a number of thousands of digits
        raise CheckpointError(f"{name} is not a sane JSON file: {str(error).partition(';')[0]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} holds a JSON {type(value).__name__}, expected an object")
    return value
