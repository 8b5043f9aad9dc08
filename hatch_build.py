"""What a built package says of itself: its description and addresses, from the one address in ``pyproject.toml``."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Description(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        root, repository = Path(self.root), self.config["repository"].rstrip("/")
        version = runpy.run_path(str(root / "src" / "zerosync_strategy" / "version.py"))["__version__"]
        describe = runpy.run_path(str(root / "docs" / "_site" / "description.py"))["description"]
        text = describe((root / "README.md").read_text(), repository, version)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {}
        if repository:
            metadata["urls"] = {"Repository": repository, "Changelog": f"{repository}/blob/main/CHANGELOG.md"}
