"""Where stores are that were not named."""

import os

from shardyard.model import Conflict
from shardyard.model.url import beside, parse_url

EARLIER_FOLDER = "data"


def default_store(option: str, what: str, url: str, file: str) -> str:
    """The store that goes with another one, `url`, which errors call `what`. `Conflict` if the other one exists and
    this one does not, but there is one where earlier versions had it: it would be taken for lost."""
    chosen = beside(what, url, file)
    path, earlier = parse_url(what, chosen).path, os.path.join(EARLIER_FOLDER, file)
    if path and os.path.exists(parse_url(what, url).path) and not os.path.exists(path) and os.path.exists(earlier):
        raise Conflict(
            f"there is no {path}, and there is {earlier}, where earlier versions stored it: name one of them, with "
            f"{option} sqlite:///{path} or {option} sqlite:///{earlier}"
        )
    return chosen
