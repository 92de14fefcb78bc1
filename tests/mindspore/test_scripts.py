"""``tenterhook record`` on MindSpore scripts that know nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tenterhook as th

NET = """
    import mindspore as ms, numpy as np
    from mindspore import nn
    from mindspore.experimental import optim
    from mindspore.mint import optim as mint_optim

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.fc1, self.act, self.fc2 = nn.Dense(3, 4), nn.ReLU(), nn.Dense(4, 2)

        def construct(self, x):
            return self.fc2(self.act(self.fc1(x)))

    net = Net()
    net.set_train()
    lossf = nn.CrossEntropyLoss()
    images = np.random.default_rng(0).random((24, 3), dtype=np.float32)
    labels = (np.arange(24) % 2).astype(np.int32)
    batches = [(ms.Tensor(images[i : i + 8]), ms.Tensor(labels[i : i + 8])) for i in (0, 8, 16)]
"""
BY_HAND = """
    opt = OPTIMIZER
    step = ms.value_and_grad(lambda x, y: lossf(net(x), y), None, opt.parameters)
    for x, y in batches:
        loss, grads = step(x, y)
        opt(grads)
"""
SGD = "nn.SGD(net.trainable_params(), 0.1)"
WAYS = {
    "by hand, nn.SGD": BY_HAND.replace("OPTIMIZER", SGD),
    "by hand, nn.Adam": BY_HAND.replace("OPTIMIZER", "nn.Adam(net.trainable_params(), 0.1)"),
    "by hand, experimental": BY_HAND.replace("OPTIMIZER", "optim.SGD(net.trainable_params(), lr=0.1)"),
    "by hand, mint": BY_HAND.replace("OPTIMIZER", "mint_optim.SGD(net.trainable_params(), lr=0.1)"),
    "GradOperation": f"""
    from mindspore import ops
    opt = {SGD}
    step = ops.GradOperation(get_by_list=True)(nn.WithLossCell(net, lossf), opt.parameters)
    for x, y in batches:
        opt(step(x, y))
    """,
    "TrainOneStepCell": f"""
    trainer = nn.TrainOneStepCell(nn.WithLossCell(net, lossf), {SGD})
    trainer.set_train()
    for x, y in batches:
        trainer(x, y)
    """,
    "Model.train": f"""
    import mindspore.dataset as ds
    data = ds.NumpySlicesDataset({{"x": images, "y": labels}}, shuffle=False).batch(8)
    ms.train.Model(net, lossf, {SGD}).train(1, data, dataset_sink_mode=False)
    """,
}


OTHERS = {
    "all kinds of parameters": (WAYS["TrainOneStepCell"], ["--kinds", "param,param_grad,update"]),
    "compiled": ("compiled = ms.jit(net)\ncompiled(batches[0][0])", []),
    "graph mode": ("ms.set_context(mode=ms.GRAPH_MODE)\nnn.ReLU()(batches[0][0])", []),
}
DRIVER = """
import contextlib, io, json, sys
from tenterhook.cli import main

done, (_, commands, target) = {}, sys.argv
for name, arguments in json.load(open(commands)).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as exit_:
            done[name] = (exit_.code, out.getvalue(), err.getvalue())
with open(target, "w") as file:
    json.dump(done, file)
"""


@dataclass
class Recorded:
    """What one script's recording printed and holds."""

    code: int
    out: str
    err: str
    rec: Any


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    """All scripts of this module, recorded one after another in one process, since MindSpore takes seconds to import."""
    folder = tmp_path_factory.mktemp("scripts")
    commands: dict[str, list[str]] = {}
    for number, (name, (program, options)) in enumerate({**{k: (v, []) for k, v in WAYS.items()}, **OTHERS}.items()):
        script = folder / f"script{number}.py"
        script.write_text(textwrap.dedent(NET) + textwrap.dedent(program))
        commands[name] = ["record", "--to", str(folder / f"{number}.thk"), *options, str(script)]
    (folder / "commands.json").write_text(json.dumps(commands))
    driver = [sys.executable, "-c", DRIVER, str(folder / "commands.json"), str(folder / "done.json")]
    run = subprocess.run(driver, capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stderr
    done = json.loads((folder / "done.json").read_text())
    return {name: Recorded(*done[name], th.open(command[2])) for name, command in commands.items()}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_training_gives_the_same_recording(recorded: dict[str, Recorded], way: str) -> None:
    result, rec = recorded[way], recorded[way].rec
    assert result.code == 0, result.err
    assert rec.manifest.framework == "mindspore"
    assert [(model.name, model.parameters) for model in rec.manifest.models] == [("Net", 26), ("CrossEntropyLoss", 0)]
    assert rec.steps == [0, 1, 2]
    assert rec.coverage.complete
    forward = ["Net/", "Net/fc1", "Net/act", "Net/fc2", "CrossEntropyLoss/"]
    backward = ["CrossEntropyLoss/", "Net/", "Net/fc2", "Net/act", "Net/fc1"]
    for step in rec.steps:
        order = [(call.phase, f"{call.model}/{call.path}") for call in rec.order() if call.step == step]
        assert order == [*(("forward", name) for name in forward), *(("backward", name) for name in backward)]


def test_parameters_their_gradients_and_updates(recorded: dict[str, Recorded]) -> None:
    rec = recorded["all kinds of parameters"].rec
    rows = rec.query("select kind, path, slot, step, mean from values where model = 'Net' order by seq").to_pylist()
    means = {(row["kind"], row["path"], row["slot"], row["step"]): row["mean"] for row in rows}
    assert len(means) == len(rows) == 3 * 4 * 3
    for path in ("fc1", "fc2"):
        for slot in ("weight", "bias"):
            for step in range(3):
                gradient, update = means["param_grad", path, slot, step], means["update", path, slot, step]
                assert update == pytest.approx(-0.1 * gradient, rel=1e-3, abs=1e-7)


def test_a_model_that_is_compiled_is_seen_and_that_is_said(recorded: dict[str, Recorded]) -> None:
    result = recorded["compiled"]
    assert [call.path for call in result.rec.order()] == ["", "fc1", "act", "fc2"]
    assert result.rec.manifest.told == [
        "Net.construct is compiled by ms.jit; it runs eager while it is watched: compiled code calls no hooks"
    ]


def test_a_script_in_graph_mode_is_told_why_nothing_is_recorded(recorded: dict[str, Recorded]) -> None:
    result = recorded["graph mode"]
    assert result.rec.order() == []
    assert "ReLU: MindSpore is in graph mode" in result.err


DROPOUT = """
    import hashlib, sys
    import mindspore as ms, numpy as np
    from mindspore import nn

    ms.set_context(pynative_synchronize=True, runtime_num_threads=1)  # dropout draws by thread: one makes it repeatable
    ms.set_seed(5)
    net = nn.SequentialCell(nn.Dense(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(p=0.5), nn.Dense(32, 4))
    net.set_train()
    lossf, opt = nn.CrossEntropyLoss(), nn.Adam(net.trainable_params(), 0.01)
    step = ms.value_and_grad(lambda x, y: lossf(net(x), y), None, opt.parameters)
    x = ms.Tensor(np.random.default_rng(0).random((8, 16), dtype=np.float32))
    y = ms.Tensor(np.arange(8, dtype=np.int32) % 4)

    def train():
        for _ in range(5):
            loss, grads = step(x, y)
            opt(grads)

    if "watched" in sys.argv:
        import tenterhook as th
        kinds = ["input", "output", "grad_input", "grad_output", "param", "param_grad", "update"]
        with th.record(net, kinds=kinds, tensors=True), th.hooks(net) as hooks:
            hooks.backward("**", lambda module, into, out: None)
            train()
    else:
        train()
    digest = hashlib.sha256(b"".join(p.asnumpy().tobytes() for p in net.get_parameters()))
    print(digest.hexdigest())
"""


def test_a_watched_training_with_dropout_equals_a_bare_one_bit_for_bit(tmp_path: Path) -> None:
    """Each in a process of its own: MindSpore cannot put its random state back."""
    script = tmp_path / "dropout.py"
    script.write_text(textwrap.dedent(DROPOUT))
    to_record = ["-m", "tenterhook", "record", "-q", "--to", str(tmp_path / "run.thk")]
    commands = [[str(script)], [str(script)], [str(script), "watched"], [*to_record, str(script)]]
    runs = [
        subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    digests = []
    for run in runs:
        out, err = run.communicate(timeout=600)
        assert run.returncode == 0, err
        digests.append(out.splitlines()[-1])
    assert len(digests[0]) == 64 and len(set(digests)) == 1
