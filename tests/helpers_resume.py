"""Interrupt a training script in the middle, and go on from what it would have saved.

Some steps after K-FAC was attached, the state dicts of model and optimizer are written to a file, K-FAC is closed, all
parameters and the optimizer's state are lost, and the run goes on with a new K-FAC and what is in the file. Random
numbers and data go on as they would have, which a script keeps by itself. With several ranks, each writes its own part
of K-FAC's state, too.
"""

import hashlib
import io

import torch
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_post_hook

import dkfac
from dkfac.tools.cli.watch import ScriptWatcher

AFTER = 6


class Interruption:
    """Notes every ``KFAC`` that is made. ``after``: the number of its steps; None: never. ``through_run``: whether
    ``dkfac run`` makes them."""

    def __init__(self, after=AFTER, *, through_run):
        self.after, self.models = after, []
        self.done = []
        """The optimizers whose training was interrupted."""
        self._made, self._watcher = [], None
        make, enter = dkfac.KFAC.__init__, ScriptWatcher.__enter__
        nobody = torch.nn.Linear(1, 1)
        nothing = torch.optim.SGD(nobody.parameters(), lr=0.1)
        self._others = lambda: dkfac.KFAC(nobody, nothing, announce=False)

        def made(kfac, model, optimizer=None, *args, **options):
            make(kfac, model, optimizer, *args, **options)
            if model is nobody:
                return
            if all(model is not other for other in self.models):
                self.models.append(model)
            if all(optimizer is not other for other in self.done):
                self._made.append((kfac, model, optimizer, options))

        def entered(watcher):
            self._watcher = watcher
            enter(watcher)
            self._listen()
            return watcher

        dkfac.KFAC.__init__, ScriptWatcher.__enter__ = made, entered
        if not through_run:
            self._listen()

    def _listen(self):
        """Hear of steps after the watcher. With one more K-FAC attached, dkfac's own hook on all optimizers stays
        while torch goes through them."""
        self._bystander = self._others()
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer, *_):
        for entry in self._made:
            kfac, model, own, options = entry
            if own is optimizer and kfac.metrics()["step"] == self.after:
                self._made.remove(entry)
                self.done.append(optimizer)
                self._interrupt(kfac, model, optimizer, options)
                return

    def _interrupt(self, kfac, model, optimizer, options):
        file, on_ranks = io.BytesIO(), distributed.is_initialized() and distributed.get_world_size() > 1
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if on_ranks:
            state["kfac"] = kfac.state_dict()
        torch.save(state, file)
        kfac.close()
        optimizer.state.clear()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        if self._watcher is None:
            kfac = dkfac.KFAC(model, optimizer, **options)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if self._watcher is not None:
            self._watcher.attach_anew(optimizer, saved.get("kfac"))
        elif on_ranks:
            kfac.load_state_dict(saved["kfac"])

    def digest(self):
        """Return a hash of all models that K-FAC was attached to."""
        found = hashlib.sha256()
        for model in self.models:
            for tensor in model.state_dict().values():
                found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def main():
    """``python helpers_resume.py STEPS COMMAND``: run a command line of Python, interrupted; for torchrun."""
    import sys

    from helpers_scripts import execute

    return execute(sys.argv[2:], after=int(sys.argv[1]))


if __name__ == "__main__":
    raise SystemExit(main())
