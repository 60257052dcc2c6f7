"""Where this package's files lie: inside it in a wheel, beside it in a checkout (an editable install, or none)."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).resolve().parent

DISTRIBUTION = "gdn-multi"


def checkout_dir() -> Path | None:
    """The checkout that this package is imported from, or None when it is installed as a wheel."""
    beside = _PACKAGE.parent
    is_checkout = (beside / "pyproject.toml").is_file() and (beside / "backends" / "__init__.py").is_file()
    return beside if is_checkout else None


def _data_dir(name: str) -> Path:
    inside = _PACKAGE / name
    if inside.is_dir():
        return inside
    checkout = checkout_dir()
    if checkout is not None and (checkout / name).is_dir():
        return checkout / name
    raise FileNotFoundError(
        f"the folder {name!r} of gdn_multi is missing: expected {inside}, or {_PACKAGE.parent / name} in a checkout; "
        f"install gdn-multi again"
    )


def csrc_dir() -> Path:
    """The folder of the CUDA sources."""
    return _data_dir("csrc")


def docs_dir() -> Path:
    """The folder of this project's documents (Markdown)."""
    return _data_dir("docs")


class Document(NamedTuple):
    name: str  #: as in the checkout: "README.md", "docs/contract.md"
    text: bytes


def documents() -> list[Document]:
    """This project's own documents: README.md first, then docs/*.md by name.

    A wheel carries the README as the description in its metadata, and docs/ as package data.
    """
    checkout = checkout_dir()
    if checkout is not None:
        readme = (checkout / "README.md").read_bytes()
    else:
        readme = _description().encode()
    docs = sorted(docs_dir().glob("*.md"))
    return [Document("README.md", readme), *(Document(f"docs/{path.name}", path.read_bytes()) for path in docs)]


def _description() -> str:
    message = metadata.metadata(DISTRIBUTION)
    # Body of the METADATA file since metadata version 2.1; older tools wrote a header.
    return message.get_payload() or message.get("Description") or ""  # type: ignore[attr-defined]
