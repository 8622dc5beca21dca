"""Our own OpenAPI document: whatever it allows is answered or refused, never with a 500 and never not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from serving import Served, demo_model

from rorqual.server.document import BODIES
from rorqual.server.settings import ServerSettings

EXAMPLES, FULL_EXAMPLES = 8, 300
"""Of each route."""
SECONDS = 30
QUIET = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server whose answers are short."""
    made = Served(demo_model(), ServerSettings(), slots=4, max_model_len=96)
    yield made
    made.close()


def test_every_body_is_described(served: Served) -> None:
    paths = served.app.openapi()["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods}
    assert posts == set(BODIES) and all("requestBody" in paths[path]["post"] for path in posts)


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(FULL_EXAMPLES, marks=pytest.mark.full)])
def test_no_route_fails(served: Served, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        tried += 1

        @settings(QUIET, max_examples=examples)
        def check(case: schemathesis.Case) -> None:
            response = case.call(timeout=SECONDS)
            case.validate_response(response, checks=[not_a_server_error])

        given(case=operation.as_strategy())(check)()
    assert tried >= len(BODIES)
    served.assert_clean()
