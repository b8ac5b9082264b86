"""Let pages link to the source: the site holds a copy of it under `code/`."""

import re
from pathlib import Path

from mkdocs.structure.files import File

SOURCE = Path("src/pevdn")


def on_files(files, config):
    for path in SOURCE.rglob("*.py"):
        name = f"code/{path.relative_to(SOURCE)}"
        files.append(File.generated(config, name, content=path.read_text()))
    return files


def on_page_markdown(markdown, **_):
    return re.sub(r"\]\(\.\./src/pevdn/([\w/]+\.py)\)", r"](code/\1)", markdown)
