"""A Hugging Face cache with one model, as huggingface_hub lays it out after a download.

In:  a folder for the cache, the name of a model, its files.   Out: the environment that names it.
"""

import json
import shutil
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


def put_into_hub_cache(home, name, files, *, ref="main", revision=REVISION):
    """Files as links to blobs; a listing names a file that no engine fetched. Returns variables."""
    model = Path(home) / "hub" / f"models--{name.replace('/', '--')}"
    snapshot, blobs = model / "snapshots" / revision, model / "blobs"
    for folder in (snapshot, blobs, model / "refs", model / "trees"):
        folder.mkdir(parents=True, exist_ok=True)
    for path in Path(files).iterdir():
        shutil.copy(path, blobs / path.name)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    if ref:
        (model / "refs" / ref).write_text(revision)
    listing = {"format_version": 1, "files": {"original.pth": {"size": 1, "blob_id": "0"}}}
    (model / "trees" / f"{revision}.json").write_text(json.dumps(listing))
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
