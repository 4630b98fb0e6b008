"""dkfac.suggest: advice that is complete, for the optimizer at hand, and can be run."""

import re

import pytest
import torch
from torch import nn

import dkfac


def said(optimizer, steps):
    lines = []
    dkfac.suggest(optimizer, steps, write=lines.append)
    return "\n".join(lines)


def parameters():
    return nn.Linear(2, 2).parameters()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_the_learning_rate_stays_and_fewer_steps_are_tried(kind):
    text = said(kind(parameters(), lr=2e-3), 1000)
    assert re.search(r"keep +learning rate", text)
    assert re.search(r"try +lr 0\.002, 0\.004 x steps 500, 750, 1000", text)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_every_setting_it_names_exists_and_its_line_of_code_runs(kind):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    text = said(optimizer, 100)
    names = set(re.findall(r"\b([a-z][a-z_0-9]+)=", text))
    assert names <= set(dkfac.Settings.__dataclass_fields__)
    line = re.search(r"dkfac\.KFAC\(.*\)", text)[0]
    kfac = eval(line, {"dkfac": dkfac, "model": model, "optimizer": optimizer})  # what the user would paste
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
    kfac.close()
    for name in re.findall(r"(grad_norm|update_norm|skipped_batches)", text):
        assert name in kfac.metrics()


def test_it_prints_by_itself(capsys):
    dkfac.suggest(torch.optim.SGD(parameters(), lr=0.1), 10)
    assert "keep" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [0, -3, 1.5, True, None])
def test_wrong_numbers_of_steps_are_refused(steps):
    with pytest.raises(ValueError, match=r"total_steps=.*integer >= 1"):
        dkfac.suggest(torch.optim.SGD(parameters(), lr=0.1), steps)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match="Linear"):
        dkfac.suggest(nn.Linear(2, 2), 10)
