"""A front over a cluster that runs, for as long as somebody wants it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rorqual.disagg.cluster.config import ClusterConfig
from rorqual.disagg.cluster.front import Front
from rorqual.disagg.cluster.supervisor import connected
from rorqual.engine.text_model import WithoutWeights


@contextmanager
def front_of(config: ClusterConfig) -> Iterator[Front]:
    """A front; what it still runs at the end of the block is ended.

        with front_of(ClusterConfig.read(Path("cluster.toml"))) as front:
            request = front.submit("The whale")
            output = front.output(request)
            while not output.finished:
                front.step()

    Raises:
        InputError: no such cluster runs, its workers have another model, or its model's folder is not here.
        CapacityError: none of its decode workers answers.
    """
    model = WithoutWeights.read(Path(config.model.path) if config.model.path else None)
    with connected(config) as posts:
        front = Front(model, posts, config.deadlines)
        try:
            yield front
        finally:
            front.close()
