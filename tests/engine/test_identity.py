"""Which model a cache is of: whatever decides what its pages hold."""

from __future__ import annotations

import pytest
import torch
from models import GOLDENS, PAGE

from rorqual.engine.identity import fingerprint
from rorqual.model.load import load
from rorqual.model.transformer import Transformer


def fresh(case: str = "fp32-vision", **options: str) -> Transformer:
    return load(GOLDENS / case, page_tokens=PAGE, kernels="plain", **options)  # type: ignore[arg-type]


def test_one_checkpoint_is_one_model_with_its_decoder_and_without() -> None:
    assert fingerprint(fresh()) == fingerprint(fresh()) == fingerprint(fresh(part="encoder"))
    assert len({fingerprint(fresh(case)) for case in ("fp32-vision", "fp32-text")}) == 2


@pytest.mark.parametrize("where", ["encoder norm", "sink", "seam norm", "compressor norm", "tower", "embedding"])
def test_another_checkpoint_of_one_config_is_another_model(where: str) -> None:
    model = fresh()
    before, body = fingerprint(model), model.backbone
    assert model.vision is not None and body.encoder[1].attn.compressor is not None
    if where == "embedding":
        body.embed = body.embed.clone()
        body.embed[0, 0] += 1
    else:
        holder, name = {
            "encoder norm": (body.encoder[0], "ffn_norm"),
            "sink": (body.encoder[2].attn, "sink"),
            "seam norm": (body.decoder[0], "attn_norm"),
            "compressor norm": (body.decoder[0].attn.compressor, "k_norm"),
            "tower": (model.vision, "image_start"),
        }[where]
        with torch.no_grad():
            getattr(holder, name).add_(1)
    assert fingerprint(model) != before
