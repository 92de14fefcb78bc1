"""Programs that look closely at how they were started, and the two ways to run them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tenterhook

__all__ = ["PROGRAMS", "Program", "environment", "run_bare", "run_recorded"]


@dataclass(frozen=True)
class Program:
    """Files, the command that runs them (what would follow ``python``), and the exit code to expect."""

    files: dict[str, str]
    command: list[str]
    code: int = 0
    stdin: str = field(default="", kw_only=True)


def script(text: str, *args: str, code: int = 0, stdin: str = "") -> Program:
    return Program({"job.py": text}, ["job.py", *args], code, stdin=stdin)


LOOK = """
import os, sys
main = sys.modules["__main__"]
print(sys.argv, sys.orig_argv, sys.path[0], os.getcwd(), len(sys.path))
print({name: value for name, value in globals().items() if name not in ("main", "__loader__", "__spec__", "__builtins__")})
print(type(__loader__), __loader__.path, __loader__.name, __spec__ and (__spec__.name, __spec__.origin, __spec__.parent))
print(__builtins__, main.__dict__ is globals(), __name__, __file__)
"""

PICKLE = """
import multiprocessing, pickle
from dataclasses import dataclass

@dataclass
class Point:
    x: int

def double(point):
    return Point(point.x * 2)

if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Point(3))))
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(double, [Point(1), Point(2)]))
"""

LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(index ** 2)

if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=4, num_workers=2)
    print([batch.tolist() for batch in loader])
"""

RAISE = """
def inner(x):
    try:
        return 1 / x
    except ZeroDivisionError as error:
        raise ValueError("naïve – ünïcode") from error

def outer():
    print("before")
    inner(0)

outer()
"""

AT_EXIT = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
VALUE = 41
class Late:
    def __del__(self):
        print("gone", VALUE)
late = Late()
def tell(what):
    print(what, sys.modules["__main__"].VALUE, threading.active_count())
atexit.register(tell, "first registered")
atexit.register(tell, "last registered")
pool = ThreadPoolExecutor(1)
print(pool.submit(lambda: 3).result())
def slow():
    time.sleep(0.2)
    print("thread done")
threading.Thread(target=slow).start()
print("main done")
"""

OWN_HOOK = """
import sys
def hook(kind, error, trace):
    print("own hook:", kind.__name__, error, trace.tb_lineno, trace.tb_next)
sys.excepthook = hook
raise RuntimeError("x")
"""

TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    loss = nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.tensor([0, 1, 0, 1, 0]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
print(torch.rand(1).item().hex(), [weight.grad.sum().item().hex() for weight in model.parameters()])
print(sorted(vars(model[1])))
"""

WORKERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
scale = nn.Linear(4, 4)

class Points(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        with torch.no_grad():  # a transform that is a module, in the worker
            return scale(torch.full((4,), float(index)))

if __name__ == "__main__":
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(scale(torch.ones(1, 4)))
    for batch in DataLoader(Points(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
"""

RECURSES = """
import torch
from torch import nn
class Endless(nn.Module):
    def forward(self, x):
        return self(x)
try:
    Endless()(torch.ones(1))
except RecursionError as error:
    print(type(error).__name__)
"""

TRACES = """
import torch, warnings
from torch import nn
warnings.simplefilter("ignore", DeprecationWarning)
net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
traced = torch.jit.trace(net, torch.ones(1, 2))
print(traced.graph_for(torch.ones(1, 2)))
print(net(torch.ones(1, 2)).shape)
"""

ODD = (
    TRAIN
    + """
import asyncio, os, shutil, sys, tempfile, threading
from concurrent.futures import ThreadPoolExecutor

def call(value, width=4):
    with torch.no_grad():
        return round(model.eval()(torch.full((1, width), float(value))).sum().item(), 4)

async def gather():
    async def one(value):
        await asyncio.sleep(0.001 * value)
        return call(value)
    return await asyncio.gather(*map(one, range(4)))

def values():
    for value in range(3):
        yield call(value)

print(asyncio.run(gather()))
with ThreadPoolExecutor(2) as pool:
    print(list(pool.map(call, range(4))))
    print(type(pool.submit(call, 1, 3).exception()).__name__)
started = values()
next(started)
started.close()
exec(compile("print(call(7))", "<cell>", "exec"))
sys.stdout.flush()
child = os.fork()
if child == 0:
    print("in the child", call(2), flush=True)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
threading.Thread(target=lambda: sys.exit(5)).start()
gone = tempfile.mkdtemp()
os.chdir(gone)
shutil.rmtree(gone)
del optimizer
print(call(3))
sys.exit("über")
"""
)

PACKAGE = {
    "pkg/__init__.py": "print('package', __name__)\n",
    "pkg/sibling.py": "NAME = __name__\n",
    "pkg/tool.py": "from . import sibling\nfrom .sibling import NAME\nprint(NAME, __package__)\n" + LOOK,
    "pkg/bad.py": "from . import sibling\ndef f():\n    raise KeyError(sibling.NAME)\nf()\n",
    "pkg/__main__.py": "from . import sibling\nprint('main of', __package__, sibling.NAME)\n" + LOOK,
}

PROGRAMS = {
    "look": script(LOOK, "--every", "3", "-o", "x", "--", "-q", "--help"),
    "look-in-subdirectory": Program({"sub/job.py": LOOK}, ["./sub/../sub/job.py", "a b"]),
    "look-at-module": Program(PACKAGE, ["-m", "pkg.tool", "--lr", "3", "-m"]),
    "package-main": Program(PACKAGE, ["-m", "pkg", "x"]),
    "package-directory": Program({"app/__main__.py": LOOK, "app/lib.py": ""}, ["app", "x"]),
    "relative-import-in-script": Program(PACKAGE, ["pkg/bad.py"], 1),
    "module-raises": Program(PACKAGE, ["-m", "pkg.bad"], 1),
    "module-is-missing": Program(PACKAGE, ["-m", "pkg.nothing"], 1),
    "raises": script(RAISE, code=1),
    "raises-own-exception": script("class Odd(Exception):\n    pass\nraise Odd(1, 2)\n", code=1),
    "raises-group": Program({"job.py": "raise ExceptionGroup('g', [ValueError(1), KeyError(2)])\n"}, ["job.py"], 1),
    "own-excepthook": script(OWN_HOOK, code=1),
    "broken-excepthook": script("import sys\nsys.excepthook = lambda *a: 1 / 0\nraise RuntimeError('x')\n", code=1),
    "exits-3": script("import sys\nprint('out')\nsys.exit(3)\n", code=3),
    "exits-0": script("import sys\nsys.exit(0)\n"),
    "exits-none": script("raise SystemExit\n"),
    "exits-minus-1": script("import sys\nsys.exit(-1)\n", code=255),
    "exits-true": script("import sys\nsys.exit(True)\n", code=1),
    "exits-message": script("import sys\nsys.exit('out of cake')\n", code=1),
    "exits-object": script("import sys\nsys.exit(['a', 1])\n", code=1),
    "exits-at-once": script("import os\nos.write(1, b'out')\nos._exit(5)\n", code=5),
    "exits-in-atexit": script("import atexit, sys\natexit.register(lambda: sys.exit(9))\n"),
    "interrupted": script("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n", code=-2),
    "interrupts-itself": script("print(1)\nraise KeyboardInterrupt('stop')\n", code=-2),
    "module-interrupted": Program({"job.py": "raise KeyboardInterrupt\n"}, ["-m", "job"], -2),
    "aborts": script("import os\nos.abort()\n", code=-6),
    "syntax-error": script("def f(:\n    pass\n", code=1),
    "indentation-error": script("if True:\nprint(1)\n", code=1),
    "unterminated": script("print('é ü', (1,\n", code=1),
    "unicode": script("print('ünï → 日本', __name__)\n"),
    "encoding-cookie": script("# -*- coding: latin-1 -*-\nprint(len('\u00e9'))\n"),
    "reads-stdin": script("import sys\nprint(sys.stdin.read().upper(), input.__name__)\n", stdin="some text\nmore"),
    "at-exit": script(AT_EXIT),
    "warns": script("import warnings\nwarnings.warn('old', DeprecationWarning)\nwarnings.warn('odd')\n"),
    "recursion": script("def f():\n    f()\ntry:\n    f()\nexcept RecursionError as error:\n    print(error)\n"),
    "source-of-own-class": script("import inspect\nclass A:\n    x = 1\nprint(inspect.getsource(A))\n"),
    "thread-raises": script(
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start()\nt.join()\n"
    ),
    "writes-to-closed-stdout": script("import sys\nprint('x')\nsys.stdout.close()\n"),
    "logs": script(
        "import logging\nlogging.basicConfig(level=10)\nlogging.info('told')\nlogging.getLogger('a').warning('b')\n"
    ),
    "asyncio": script(
        "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    raise OSError('late')\nasyncio.run(main())\n",
        code=1,
    ),
    "trains": script(TRAIN),
    "trains-and-raises": script(TRAIN + "raise ValueError(loss.shape)\n", code=1),
    "trains-and-exits-3": script(TRAIN + "raise SystemExit(3)\n", code=3),
    "trains-with-workers": script(WORKERS),
    "trains-in-odd-ways": script(ODD, code=1),
    "trains-and-traces": script(TRACES + TRAIN),
    "trains-and-recurses": script(RECURSES + TRAIN),
    "pickles": script(PICKLE),
    "loader-workers": script(LOADER),
}
if sys.version_info < (3, 11):
    del PROGRAMS["raises-group"]


def run_bare(
    folder: Path, command: list[str], stdin: str = "", *, options: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python COMMAND``."""
    return _run(folder, [sys.executable, *(options or []), *command], stdin)


def run_recorded(
    folder: Path,
    command: list[str],
    stdin: str = "",
    *,
    ours: list[str] | None = None,
    quiet: bool = True,
    options: list[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``tenterhook record OURS COMMAND``."""
    own = [*(ours or ["-o", str(folder.parent / "r.thk")]), *(["-q"] if quiet else [])]
    return _run(folder, [sys.executable, *(options or []), "-m", "tenterhook", "record", *own, *command], stdin)


def _run(folder: Path, command: list[str], stdin: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        input=stdin,
        capture_output=True,
        check=False,
        encoding="utf-8",
        env=environment(),
        timeout=120,
    )


def environment(**changes: str) -> dict[str, str]:
    """The environment of a child that imports the same tenterhook as we do."""
    source = str(Path(tenterhook.__file__).parents[1])
    return {
        **os.environ,
        "PYTHONPATH": source,
        "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "utf-8",
        "COLUMNS": "80",
        **changes,
    }
