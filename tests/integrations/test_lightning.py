"""``KFACCallback`` in Lightning's real ``Trainer``: automatic and manual optimization, two optimizers, checkpoints."""

import pytest
import torch
from torch import nn

import dkfac

lightning = pytest.importorskip("lightning", reason="the extra dkfac[lightning] is not installed")

from dkfac.integrations.lightning import KFACCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own

EVERY_STEP = {"announce": False, "factor_interval": 1, "inverse_interval": 1}


class Regression(lightning.LightningModule):
    def __init__(self, *, manual=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.automatic_optimization = not manual
        self.losses = []

    def training_step(self, batch, _):
        loss = (self.net(batch[0]) - batch[0][:, :3]).square().mean()
        self.losses.append(float(loss.detach()))
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Pair(lightning.LightningModule):
    """Two networks, each with its own optimizer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.automatic_optimization = False

    def training_step(self, batch, _):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward((self.second(self.first(batch[0])) - batch[0][:, :3]).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.first, self.second)]


def data(batch=16):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=batch)


def fit(model, folder, callback, *, epochs=3, resume=None, batch=16, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    given = {"accelerator": "cpu", "devices": 1, "logger": False, "default_root_dir": folder, "max_epochs": epochs}
    trainer = lightning.Trainer(callbacks=[callback], **(given | quiet | options))
    trainer.fit(model, data(batch), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_it_attaches_trains_and_detaches_like_a_plain_loop(manual, tmp_path):
    model, callback = Regression(manual=manual), KFACCallback(**EVERY_STEP)
    fit(model, tmp_path, callback)
    assert callback.kfac.metrics()["step"] == 12
    assert sorted(callback.kfac.factors()) == ["net.0", "net.2"]
    dkfac.KFAC(model, model.configure_optimizers(), announce=False)  # refused if one were attached
    plain = Regression()
    optimizer = plain.configure_optimizers()
    dkfac.KFAC(plain, optimizer, **EVERY_STEP)
    for _ in range(3):
        for (x,) in data():
            optimizer.zero_grad()
            (plain.net(x) - x[:, :3]).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_training_resumes_bitwise_from_a_checkpoint(manual, tmp_path):
    whole = Regression(manual=manual)
    fit(whole, tmp_path, KFACCallback(**EVERY_STEP), epochs=5)

    part = Regression(manual=manual)
    model_checkpoint = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="at", save_last=True)
    callback = KFACCallback(**EVERY_STEP)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=3, callbacks=[callback, model_checkpoint], **quiet)
    trainer.fit(part, data())
    again, callback = Regression(manual=manual, seed=1), KFACCallback(**EVERY_STEP)
    fit(again, tmp_path, callback, epochs=5, resume=tmp_path / "last.ckpt")
    assert callback.kfac.metrics()["step"] == 20
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters(), strict=True))


def test_a_checkpoint_without_kfacs_state_is_said(tmp_path):
    trainer = fit(Regression(), tmp_path, lightning.Callback())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.warns(UserWarning, match="resumes at step 12 from a checkpoint without K-FAC's state"):
        fit(Regression(), tmp_path, KFACCallback(**EVERY_STEP), epochs=4, resume=tmp_path / "plain.ckpt")


def test_accumulated_batches_give_the_factors_of_the_whole_batch(tmp_path):
    found = {}
    for parts in (1, 4):
        model, callback = Regression().double(), KFACCallback(**EVERY_STEP, curvature="kfac", damping=0.1)
        options = {"accumulate_grad_batches": parts, "precision": "64-true"}
        fit(model, tmp_path, callback, epochs=1, batch=64 // parts, **options)
        assert callback.kfac.metrics()["step"] == 1
        found[parts] = callback.kfac.factors()
    for name, factors in found[1].items():
        for key, value in factors.items():
            torch.testing.assert_close(found[4][name][key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chosen", [None, [1]])
def test_each_optimizer_gets_a_kfac_or_those_that_are_chosen(chosen, tmp_path):
    callback = KFACCallback(optimizers=chosen, **EVERY_STEP)
    fit(Pair(), tmp_path, callback)
    layers = {i: list(kfac.factors()) for i, kfac in callback.kfacs.items()}
    assert layers == ({0: ["first"], 1: ["second"]} if chosen is None else {1: ["second"]})
    assert all(kfac.metrics()["step"] == 12 for kfac in callback.kfacs.values())


def test_metrics_reach_the_trainers_loggers(tmp_path):
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    fit(Regression(), tmp_path, KFACCallback(**EVERY_STEP), logger=logger, log_every_n_steps=2)
    rows = logger.experiment.metrics or (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "kfac/update_norm" in str(rows)


def test_an_error_in_training_detaches(tmp_path):
    class Failing(Regression):
        def on_train_epoch_end(self):
            raise RuntimeError("stop")

    model, callback = Failing(), KFACCallback(**EVERY_STEP)
    with pytest.raises(RuntimeError, match="stop"):
        fit(model, tmp_path, callback)
    dkfac.KFAC(model, model.configure_optimizers(), announce=False)  # refused if one were attached
