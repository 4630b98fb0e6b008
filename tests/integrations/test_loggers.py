"""Metrics reach loggers of every shape: fakes with the methods of TensorBoard, MLflow and W&B, and the real ones."""

import sys

import pytest
import torch
from torch import nn

import dkfac
from dkfac.integrations.loggers import log_metrics


@pytest.fixture
def kfac():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = dkfac.KFAC(model, optimizer, announce=False)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return kfac


class Writer:
    """As ``torch.utils.tensorboard.SummaryWriter``."""

    def __init__(self):
        self.seen = {}

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.seen[tag] = scalar_value, global_step


class MLflow:
    """As the module ``mlflow`` and the loggers of Lightning."""

    def __init__(self):
        self.seen = {}

    def log_metrics(self, metrics, step=None):
        self.seen |= {name: (value, step) for name, value in metrics.items()}

    def log(self, *args):
        raise AssertionError("log_metrics comes first")


class WandB:
    """As the module ``wandb``, a run, and Accelerate's ``Accelerator``."""

    def __init__(self):
        self.seen = {}

    def log(self, data, step=None):
        self.seen |= {name: (value, step) for name, value in data.items()}


@pytest.mark.parametrize("kind", [Writer, MLflow, WandB])
def test_every_kind_of_logger_gets_all_metrics_with_the_step(kind, kfac):
    logger = kind()
    returned = log_metrics(kfac, logger)
    wanted = {f"kfac/{name}": value for name, value in kfac.metrics().items() if name != "step"}
    assert returned == wanted
    assert logger.seen == {name: (value, 2) for name, value in wanted.items()}
    assert wanted["kfac/grad_norm"] > 0


def test_step_and_prefix_are_the_callers(kfac):
    seen = []
    log_metrics(kfac, lambda found, step: seen.append((found, step)), 40, "opt.")
    ((found, step),) = seen
    assert step == 40
    assert all(name.startswith("opt.") for name in found)
    assert "opt.step" not in found


def test_what_cannot_log_is_refused_by_name(kfac):
    with pytest.raises(TypeError, match=r"add_scalar, log_metrics or log.*not int"):
        log_metrics(kfac, 3)


@pytest.mark.filterwarnings("ignore")
def test_the_real_tensorboard(kfac, tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        wanted = log_metrics(kfac, writer)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(read.Tags()["scalars"]) == sorted(wanted)
    (event,) = read.Scalars("kfac/grad_norm")
    assert event.step == 2
    assert event.value == pytest.approx(wanted["kfac/grad_norm"])


@pytest.mark.filterwarnings("ignore")
def test_the_real_mlflow(kfac, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("kfac")
    with mlflow.start_run() as run:
        wanted = log_metrics(kfac, mlflow)
    found = mlflow.get_run(run.info.run_id).data.metrics
    assert found == pytest.approx(wanted)


@pytest.mark.filterwarnings("ignore")
def test_the_real_wandb(kfac, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", project="kfac", dir=tmp_path) as run:
        wanted = log_metrics(kfac, run, 0)
        wanted = log_metrics(kfac, wandb, 1)
        found = {name: run.summary[name] for name in wanted}
    assert found == pytest.approx(wanted)


def test_dkfac_imports_no_package_of_an_integration():
    import subprocess

    blocked = ("transformers", "accelerate", "lightning", "pytorch_lightning", "tensorboard", "wandb", "mlflow")
    code = f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
    code += "import dkfac, dkfac.integrations, dkfac.integrations.loggers"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
