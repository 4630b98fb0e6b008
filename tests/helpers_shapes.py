"""The shapes of training script in tests/scripts: what is expected of each, and how each is run.

``python tests/helpers_shapes.py`` runs all of them and writes the table of docs/scripts.md; with names, those.
"""

import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from helpers_resume import AFTER
from helpers_scripts import Forks

SCRIPTS = Path(__file__).parent / "scripts"
ONE_LINE, LAST_LINE = "# (the one line)", "# (the last line)"
KFAC, DETACH = '__import__("dkfac").KFAC', '__import__("dkfac").detach(model)'


@dataclass(frozen=True)
class Shape:
    """What is expected of a script."""

    name: str
    shares: tuple[float, ...] = (100.0,)
    """Percent of each optimizer's parameters that K-FAC preconditions, in the order of attaching."""
    line: str | None = f"{KFAC}(model, optimizer)"
    """The one line; None: there is no natural place for it."""
    last_line: str = ""
    """Where the script has a place for it: what must end K-FAC before it goes on."""
    line_shares: tuple[float, ...] | None = None
    """As ``shares``, with the one line; None: the same. Then both ways end with the same weights, bit by bit."""
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    status: int = 0
    says: str | None = None
    """What ``dkfac run`` says besides."""
    launch: tuple[str, ...] = ()
    slow_line: bool = False
    why_no_line: str = ""
    why_not_resumed: str = ""
    is_like_line: bool = True
    """Whether both ways end with the same weights, bit by bit."""

    def shares_of(self, *, through_run: bool) -> tuple[float, ...]:
        return self.shares if through_run or self.line_shares is None else self.line_shares


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
SHAPES = [
    Shape("plain_sgd"),
    Shape("plain_adamw"),
    Shape("epochs_eval", shares=(96.7,)),
    Shape("closure"),
    Shape("accumulation", options=("--set", "accumulate=mean"), line=f'{KFAC}(model, optimizer, accumulate="mean")'),
    Shape("scaler"),
    Shape("autocast_bf16", shares=(82.1,)),
    Shape("clipping"),
    Shape("schedulers"),
    Shape("param_groups", shares=(96.5,)),
    Shape("folds", shares=(100.0, 100.0, 100.0)),
    Shape("phases", shares=(100.0, 100.0), line=f"{DETACH}; {KFAC}(model, optimizer)", says="K-FAC follows it",
          is_like_line=False),
    Shape("unfreezing", shares=(15.8, 100.0, 100.0), line_shares=(15.8,), says="trains more parameters than before",
          is_like_line=False),
    Shape("switch", shares=(100.0, 100.0), line=None, says="K-FAC follows it", why_no_line="at each change"),
    Shape("gan", shares=(100.0, 100.0), options=("--set", "accumulate=sum"), is_like_line=False,
          line=f'[{KFAC}(discriminator, optimizer_d, accumulate="sum"), {KFAC}(generator, optimizer_g)]'),
    Shape("gan_frozen", shares=(100.0, 100.0),
          line=f"[{KFAC}(generator, optimizer_g), {KFAC}(discriminator, optimizer_d)]"),
    Shape("actor_critic", line=f"{KFAC}(agent, optimizer)"),
    Shape("separate_modules", line=f"{KFAC}(nn.ModuleList([encoder, decoder]), optimizer)"),
    Shape("two_optimizers", says="K-FAC cannot be attached to Adam (optimizer 2, 1 parameters): no module"),
    Shape("vae"),
    Shape("lstm_lm", shares=(23.3,), options=("--set", "batch_dim=1"), line=f"{KFAC}(model, optimizer, batch_dim=1)"),
    Shape("nanogpt", shares=(94.0,), arguments=("12",)),
    Shape("siamese"),
    Shape("compiled"),
    Shape("checkpointing"),
    Shape("cross_attention", shares=(94.2,)),
    Shape("reference_classification", shares=(97.0,)),
    Shape("timm_like", shares=(95.3,), options=("--set", "accumulate=mean"),
          line=f'{KFAC}(model, optimizer, accumulate="mean")'),
    Shape("ddp", launch=TORCHRUN, slow_line=True),
    Shape("spawn_ddp", slow_line=True, why_not_resumed="as ddp"),
    Shape("data_parallel"),
    Shape("package.train", arguments=("--rate", "0.1")),
    Shape("lr_finder", shares=(100.0, 100.0), line=f"{DETACH}; {KFAC}(model, optimizer)", line_shares=(100.0,),
          says="K-FAC follows it", is_like_line=False),
    Shape("ema"),
    Shape("sam", shares=(100.0, 100.0), line=f"{KFAC}(model, optimizer.base)", line_shares=(100.0,),
          says="K-FAC follows it", is_like_line=False),
    Shape("exports", last_line=DETACH),
    Shape("gradient_penalty"),
    Shape("workers"),
    Shape("exits", status=7),
    Shape("lbfgs", shares=(), line=None, says="LBFGS evaluates the loss several times per step",
          why_no_line="refused", why_not_resumed="its own business"),
]  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a run of a script has shown."""

    status: int
    losses: tuple[float, float]
    shares: tuple[float, ...]
    digest: str
    num_interrupted: int
    stderr: str


def command_of(shape, *, through_run, after=None):
    """The command line of Python that runs a script. ``after``: with torchrun, the processes interrupt themselves."""
    script = ["-m", shape.name] if "." in shape.name else [f"{shape.name}.py"]
    dkfac = ["-m", "dkfac", "run", *shape.options] if through_run else []
    helper = [Path(__file__).parent / "helpers_resume.py", after or 0] if shape.launch else []
    return [*shape.launch, *helper, *dkfac, *script, *shape.arguments]


def copied(shape, folder, *, with_line=False):
    """Copy the scripts; with the one line in this one."""
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    if with_line:
        path = folder / f"{shape.name.replace('.', '/')}.py"
        text = path.read_text()
        assert text.count(ONE_LINE) == 1
        path.write_text(text.replace(ONE_LINE, shape.line).replace(LAST_LINE, shape.last_line))


def run_shape(forks, shape, folder, *, through_run, after=None):
    copied(shape, folder, with_line=not through_run)
    command = command_of(shape, through_run=through_run, after=after)
    result = forks.run(folder, *command, watched=not shape.launch, after=after)
    losses = re.search(r"^loss (\S+) (\S+)$", result.stdout, re.MULTILINE)
    assert losses is not None, result.stderr
    said = re.findall(r"^dkfac: \d+ layers with (\S+)% of the parameters", result.stderr, re.MULTILINE)
    numbers = tuple(map(float, losses.groups())), tuple(map(float, said))
    return Run(result.returncode, *numbers, result.digest, result.num_interrupted, result.stderr)


# --- the table -----------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs/scripts.md"
BEGIN, END = "<!-- written by tests/helpers_shapes.py: begin -->", "<!-- written by tests/helpers_shapes.py: end -->"
HEAD = "| script | K-FAC has | loss, `dkfac run` | loss, one line | resumed | exit |\n|---|---|---|---|---|---|"


def percents(shares):
    return ", ".join(f"{share:g}%" for share in shares) or "nothing"


def cells(shape):
    """What a row says that does not depend on the machine: its first cell, what K-FAC has, and the exit status."""
    path = SCRIPTS / f"{shape.name.replace('.', '/')}.py"
    about = path.read_text().split('"""')[1].split("\n\n")[0].strip().rstrip(".")
    name = f"`{shape.name}`: {about}"
    has = percents(shape.shares)
    if shape.line_shares is not None:
        has = f"{has}; one line: {percents(shape.line_shares)}"
    return name, has, str(shape.status)


def row_of(forks, shape):
    """Run a script in every way and return its row; raises if it does not do what is expected."""
    losses, resumed = [], []
    for through_run in (True, False):
        if not through_run and shape.line is None:
            losses.append(shape.why_no_line)
            continue
        runs = []
        for after in (None, AFTER) if not shape.why_not_resumed else (None,):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run_shape(forks, shape, Path(folder), through_run=through_run, after=after))
        whole = runs[0]
        assert (whole.status, whole.shares) == (shape.status, shape.shares_of(through_run=through_run)), whole.stderr
        assert whole.losses[1] < whole.losses[0]
        assert len(runs) < 2 or (runs[1].digest == whole.digest and runs[1].num_interrupted > 0), shape.name
        losses.append("{:.2g} → {:.2g}".format(*whole.losses))
        resumed += ["bitwise"] * (len(runs) - 1)
    name, has, status = cells(shape)
    return f"| {name} | {has} | {losses[0]} | {losses[1]} | {shape.why_not_resumed or resumed[0]} | {status} |"


def main():
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    known = {line.split("`")[1]: line for line in table.splitlines() if "`" in line.partition("|")[2][:3]}
    forks, rows = Forks(), []
    for shape in SHAPES:
        is_wanted = not sys.argv[1:] or shape.name in sys.argv[1:] or shape.name not in known
        rows.append(row_of(forks, shape) if is_wanted else known[shape.name])
        print(rows[-1], flush=True)
    forks.close()
    table = "\n".join([HEAD, *rows])
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
