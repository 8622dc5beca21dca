"""The simulated decoder seam is the one that inference has: CED prefill of N tokens, then the rest by decoding."""

from pathlib import Path

import torch
from torch.nn import functional as F

from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.model.load import load
from rorqual.training.export import export
from rorqual.training.forward import backbone, training_rows
from rorqual.training.kv import Choice
from rorqual.training.learner import Phase
from rorqual.training.objective import draw
from rorqual.training.recipe import LossRecipe
from tests.training.models import learner, packed


def test_rows_after_the_seam_are_those_of_a_ced_prefill(tmp_path: Path) -> None:
    made, prompt, total = learner(8), 60, 76
    window = made.config.sliding_window
    export(made.parameters, made.config, None, tmp_path / "model", quantised=False)
    model = load(tmp_path / "model", page_tokens=16, kernels="plain")
    with torch.no_grad():
        for parameter, stored in zip(made.parameters.values(), _stored(made.parameters), strict=True):
            parameter.copy_(stored)
    packed_ = packed([total])
    found = {}
    for name, seam in (("seam", prompt - window), ("none", None)):
        made.rounding.turn(False)
        choice = Choice(index_rows=torch.empty(0, dtype=torch.int64), row_weight=0.0, seam=seam)
        run, _ = made._run(Phase(), [choice])
        with torch.no_grad():
            normed = backbone(made.model, packed_.ids, training_rows(made.model, [packed_]), run).normed_TD
            found[name] = F.linear(normed, made.model.backbone.head.expand())
    sequence = Sequence(model, new_cache(model, total + 4))
    rows = [sequence.prefill(Prompt(ids=packed_.ids[:prompt]), mode="ced")[-1].logits[-1]]
    rows += [sequence.append(packed_.ids[i : i + 1]).logits[-1] for i in range(prompt, total)]
    served = torch.stack(rows)
    apart = {name: (logits[prompt - 1 :] - served).abs().mean() for name, logits in found.items()}
    # What is left are roundings of cache entries that hang on a last bit.
    assert apart["seam"] < 0.02 * served.std() and apart["seam"] < 0.2 * apart["none"], apart


def _stored(parameters: dict[str, torch.nn.Parameter]) -> list[torch.Tensor]:
    """As a plain checkpoint keeps them: matrices in bf16, the small fp32 things as they are."""
    fp32 = ("_fn", "_base", "_scale", "attn_sink", "gate.bias")
    return [p if name.endswith(fp32) else p.to(torch.bfloat16).float() for name, p in parameters.items()]


def test_seams_are_drawn_where_a_prompt_can_end() -> None:
    window, seams = 16, []
    for number in range(200):
        choices = draw(packed([40, 10], number), LossRecipe(), 0.5, window, seed=3)
        assert choices[1].seam is None  # no prompt of 10 tokens leaves decoder rows out
        seams.append(choices[0].seam)
        assert choices[0].index_rows.tolist() == sorted(set(choices[0].index_rows.tolist())) and len(choices) == 2
        assert len(choices[0].index_rows) == 10 and choices[0].row_weight == 4.0
    drawn = [s for s in seams if s is not None]
    assert 70 < len(drawn) < 130 and min(drawn) >= 1 and max(drawn) <= 40 - window and len(set(drawn)) > 15
    again = draw(packed([40, 10], 7), LossRecipe(), 0.5, window, seed=3)
    assert again[0].seam == seams[7]
