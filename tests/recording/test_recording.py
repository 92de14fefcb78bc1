"""What a recording answers, live in memory and opened from a directory alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import torch

from tenterhook.errors import AmbiguousError, NotRecordedError, RecordingError
from tenterhook.recording import DiskSink, Manifest, MemorySink, Nested, Recording, Value, open_recording
from tests.recording.synthetic import call, calls_batch, modules_table, step_of_rows, value, values_batch

Writer = MemorySink | DiskSink
Build = Callable[[Callable[[Writer], None]], Recording]


@pytest.fixture(params=["live", "memory", "disk", "unfinished"])
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Build:
    """Gives a function that lets rows be written to a sink and gives the recording of them, in each of its forms."""

    def made(write: Callable[[Writer], None]) -> Recording:
        manifest = Manifest()
        in_memory = request.param in ("live", "memory")
        sink = MemorySink(manifest) if in_memory else DiskSink(tmp_path / "a.thk", manifest)
        write(sink)
        if request.param in ("memory", "disk"):
            sink.close(manifest, modules_table())
        elif isinstance(sink, DiskSink):
            sink.flush()
            request.addfinalizer(lambda: sink.close(manifest, modules_table()))
        return Recording(sink) if isinstance(sink, MemorySink) else open_recording(tmp_path / "a.thk")

    return made


def three_steps(sink: Writer) -> None:
    for step in range(3):
        calls, values = step_of_rows(step)
        sink.write_calls(calls)
        sink.write_values(values)


def test_order_is_that_of_execution(build: Build) -> None:
    order = build(three_steps).order()
    assert [(call.step, call.phase, call.path) for call in order[:6]] == [
        (0, "forward", ""),
        (0, "forward", "conv1"),
        (0, "forward", "relu"),
        (0, "forward", "fc"),
        (0, "backward", "fc"),
        (1, "forward", ""),
    ]
    assert len(order) == 15
    assert order[1].parent == order[0].seq
    assert order[1].type == "Conv2d"


def test_rows_come_back_as_they_were_written(build: Build) -> None:
    recording = build(three_steps)
    written = pa.Table.from_batches([step_of_rows(step)[1] for step in range(3)]).unify_dictionaries()
    read = recording.table("values")
    assert read["rank"].to_pylist() == [0] * 15
    assert read.drop_columns(["rank"]).to_pylist() == written.to_pylist()
    assert read.schema.remove(read.schema.get_field_index("rank")) == written.schema


def test_steps_and_models(build: Build) -> None:
    recording = build(three_steps)
    assert recording.steps == [0, 1, 2]
    assert recording.models == ["Net"]
    assert recording.ranks == [0]
    assert "Recording of Net" in repr(recording) and "3 steps" in repr(recording)
    assert str(recording).startswith("Recording of Net") and "\n  3 steps, " in str(recording)


def test_a_recording_without_rows_answers(build: Build) -> None:
    recording = build(lambda sink: None)
    assert recording.order() == [] and recording.steps == []
    assert recording.table("values").num_rows == 0
    assert recording.query("select count(*) as n from values").to_pylist() == [{"n": 0}]
    with pytest.raises(NotRecordedError):
        recording["nothing"].output  # noqa: B018


def test_statistics_stand_for_a_tensor_that_was_not_stored(build: Build) -> None:
    output = build(three_steps)["conv1"].calls[1].output
    assert isinstance(output, Value)
    assert (output.shape, output.dtype, output.device) == ((2, 3), "float32", "cpu")
    assert (output.mean, output.absmax, output.nan_count, output.step) == (0.5, 2.25, 0, 1)
    assert output.digest == 2**64 - 1 - 111
    assert output.sketch is not None and output.sketch.dtype == np.float32 and output.sketch.tolist() == [111.0] * 64
    assert repr(output) == "conv1:output#0@1 float32 (2, 3) x∈[-1.5, 2.25] μ=0.5 σ=1"
    with pytest.raises(NotRecordedError, match=r"tensors=True"):
        output.tensor  # noqa: B018
    with pytest.raises(AttributeError):
        output.median  # noqa: B018


def one_call(sink: Writer) -> None:
    sink.write_calls(calls_batch(call(1)))
    sink.write_values(values_batch(value(2, 1)))


def one_stored(sink: Writer) -> None:
    sink.write_calls(calls_batch(call(1)))
    sink.write_tensor("t", np.arange(3.0))
    sink.write_values(values_batch(value(2, 1, tensor="t")))


@pytest.mark.parametrize(
    "use",
    [
        lambda output: output + 1,
        lambda output: 2 * output,
        lambda output: np.ones(3) - output,
        lambda output: torch.ones(3) * output,
        lambda output: output @ torch.ones(3, 3),
        lambda output: -output,
        lambda output: output > 0,
        lambda output: output[0],
        list,
        float,
        np.asarray,
        np.abs,
    ],
)
def test_calculating_with_what_was_not_stored_says_what_to_do(build: Build, use: Callable[[Any], object]) -> None:
    output = build(one_call)["conv1"].output
    with pytest.raises(NotRecordedError, match=r"conv1:output#0@0 was recorded without its tensor.*tensors=True"):
        use(output)
    with pytest.raises(
        AttributeError, match=r"no attribute 'softmax'; conv1:output#0@0 was recorded without its tensor"
    ):
        output.softmax(0)


def test_numpy_takes_a_value_whose_tensor_was_stored(build: Build) -> None:
    [found] = build(one_stored)["conv1"].calls[0].values
    assert np.asarray(found).tolist() == [0, 1, 2] and np.asarray(found, np.float32).dtype == np.float32
    with pytest.raises(NotRecordedError, match=r"the tensor itself is \.tensor"):
        found + 1


def test_what_is_wrong_with_a_value_is_in_its_line() -> None:
    sink = MemorySink()
    sink.write_calls(calls_batch(call(0)))
    sink.write_values(values_batch(value(1, 0, nan_count=3, posinf_count=1, device="cuda:0", note="alias went stale")))
    line = repr(Recording(sink)["conv1"].output)
    assert "3 NaN!" in line and "1 +Inf!" in line and "cuda:0" in line and "alias went stale" in line


def test_several_calls_are_ambiguous_and_the_error_says_how_to_choose(build: Build) -> None:
    view = build(three_steps)["conv1"]
    with pytest.raises(AmbiguousError, match=r"called 3 times.*\.calls\[0\]\.output to \.calls\[2\]\.output"):
        view.output  # noqa: B018
    assert [call.step for call in view.calls] == [0, 1, 2]


def test_an_unknown_module_is_answered_with_the_nearest(build: Build) -> None:
    recording = build(three_steps)
    with pytest.raises(NotRecordedError, match="nearest are conv1"):
        recording["conv"]
    assert "conv1" in recording and "conv" not in recording
    assert recording["(root)"].path == recording[""].path == ""
    assert recording["Net/conv1"] == recording["conv1"]


def test_forward_and_backward_calls_know_each_other(build: Build) -> None:
    recording = build(three_steps)
    forward = recording["fc"].calls[0]
    backward = recording["fc"].backward_calls[0]
    assert forward.grad_output == backward.grad_output
    assert backward.output == forward.output
    assert forward.grad_output.kind == "grad_output"
    with pytest.raises(NotRecordedError, match="no grad_input was recorded for fc#0@0, only grad_output, output"):
        forward.grad_input  # noqa: B018


def test_two_backward_passes_are_ambiguous() -> None:
    sink = MemorySink()
    rows = [call(0), call(2, phase="backward", forward=0), {**call(4, phase="backward", forward=0), "pass": 1}]
    sink.write_calls(calls_batch(*rows))
    sink.write_values(values_batch(*(value(seq, seq - 1, kind="grad_output", phase="backward") for seq in (3, 5))))
    recording = Recording(sink)
    with pytest.raises(AmbiguousError, match="2 values of kind grad_output"):
        recording["conv1"].grad_output  # noqa: B018
    assert [call.grad_output.seq for call in recording["conv1"].backward_calls] == [3, 5]


def nested_call(sink: Writer) -> None:
    slots = ["[0]", '["logits"]', ".hidden_states[0]", ".hidden_states[1]"]
    sink.write_calls(calls_batch(call(0)))
    outputs = [value(index + 1, 0, slot=slot) for index, slot in enumerate(slots)]
    inputs = [value(9, 0, kind="input", slot="x"), value(10, 0, kind="input", slot="mask[0]")]
    sink.write_values(values_batch(*inputs, *outputs))


def test_nested_values_are_gone_into_as_they_were(build: Build) -> None:
    recording = build(nested_call)
    output, given = recording["conv1"].output, recording["conv1"].input
    assert isinstance(output, Nested) and isinstance(given, Nested)
    assert list(output) == ["[0]", '["logits"]', ".hidden_states[0]", ".hidden_states[1]"]
    assert output["[0]"] == output[0] and output['["logits"]'] == output["logits"]
    assert output.hidden_states[1] == output[".hidden_states[1]"]
    assert list(output.hidden_states) == [".hidden_states[0]", ".hidden_states[1]"]
    assert given["x"].kind == "input" and given["mask"][0] == given["mask[0]"]
    with pytest.raises(NotRecordedError, match="no slot 'loss'; its slots are"):
        output["loss"]
    assert not hasattr(output, "loss")
    assert output["[0]"].address == "conv1:output[0]#0@0" and given["x"].address == "conv1:input.x#0@0"


def test_what_holds_one_tensor_gives_it(build: Build) -> None:
    given = build(nested_call)["conv1"].input
    assert given["mask"].only() == given["mask[0]"]
    with pytest.raises(AmbiguousError, match=r"holds 2 tensors; choose one: 'x', 'mask\[0\]'"):
        given.only()
    with pytest.raises(
        AttributeError, match=r"no slot 'shape'; its slots are 'mask\[0\]'; \.only\(\) gives its one tensor"
    ):
        given["mask"].shape  # noqa: B018


def test_a_module_prints_all_that_was_seen_of_its_calls(build: Build) -> None:
    def write(sink: Writer) -> None:
        sink.write_calls(calls_batch(call(0), call(3, phase="backward", forward=0)))
        sink.write_values(values_batch(value(1, 0), value(4, 3, kind="grad_output", phase="backward")))

    lines = repr(build(write)["conv1"]).splitlines()
    assert lines[0].endswith(": 1 call")
    assert [line.split()[0] for line in lines[1:]] == ["conv1:output#0@0", "conv1:grad_output#0@0"]


def test_a_stored_tensor_is_given_itself(build: Build) -> None:
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16)

    def write(sink: Writer) -> None:
        sink.write_calls(calls_batch(call(0)))
        sink.write_tensor("t0", tensor)
        sink.write_values(values_batch(value(1, 0, tensor="t0", dtype="bfloat16")))

    recording = build(write)
    output = recording["conv1"].output
    assert isinstance(output, np.ndarray) and output.dtype == ml_dtypes.bfloat16
    assert output.tobytes() == tensor.tobytes() and output.shape == (2, 3)
    stored = recording["conv1"].calls[0].values[0]
    assert stored.stored and stored.as_numpy().tobytes() == tensor.tobytes()
    assert len(recording["conv1"].outputs) == 1


def test_a_live_recording_gives_the_very_object() -> None:
    tensor, sink = object(), MemorySink()
    sink.write_calls(calls_batch(call(0)))
    sink.write_values(values_batch(value(1, 0, tensor="t0")))
    sink.write_tensor("t0", tensor)
    assert Recording(sink)["conv1"].output is tensor


def test_a_live_recording_sees_what_came_after_it_was_asked() -> None:
    sink = MemorySink()
    recording = Recording(sink)
    held = [step_of_rows(step)[0] for step in range(2)]
    assert recording.order() == []
    sink.before_read = lambda: sink.write_calls(held.pop()) if held else None
    assert len(recording["conv1"].calls) == 2
    three_steps(sink)
    assert len(recording["conv1"].calls) == 5


def test_a_sequence_reads_a_module_over_all_steps(build: Build) -> None:
    def write(sink: Writer) -> None:
        for step in range(5):
            sink.write_tensor(f"t{step}", np.full((2, 3), step, np.float32))
            sink.write_calls(calls_batch(call(step * 10, step)))
            sink.write_values(values_batch(value(step * 10 + 1, step * 10, step, tensor=f"t{step}")))

    outputs = build(write)["conv1"].outputs
    assert len(outputs) == 5 and outputs.steps == [0, 1, 2, 3, 4]
    assert [float(tensor[0, 0]) for tensor in outputs] == [0, 1, 2, 3, 4]
    assert float(outputs[-1].sum()) == 24 and [float(tensor.max()) for tensor in outputs[1:3]] == [1, 2]
    with pytest.raises(IndexError):
        outputs[5]


def test_a_sequence_of_what_was_not_stored_says_so(build: Build) -> None:
    with pytest.raises(NotRecordedError, match="tensors=True"):
        build(three_steps)["conv1"].outputs  # noqa: B018


def test_a_bare_path_means_the_largest_model(tmp_path: Path) -> None:
    sink = MemorySink()
    sink.write_calls(calls_batch(call(0, model="Small"), call(1, model="Large"), call(2, model="Large", path="only")))
    large = modules_table("Large").to_pylist()
    for row in large:
        row["parameters"] = 1000
    rows = [*modules_table("Small").to_pylist(), *large]
    sink.close(Manifest(), pa.Table.from_pylist(rows, modules_table().schema))
    recording = Recording(sink)
    assert recording.models == ["Large", "Small"]
    assert recording["conv1"].model == "Large" and recording["Small/conv1"].model == "Small"
    assert recording["Small"].path == "" and recording["Small"].model == "Small"


def test_coverage_lists_what_was_not_seen() -> None:
    sink = MemorySink()
    three_steps(sink)
    sink.close(Manifest(), modules_table(relu="inside a compiled region"))
    coverage = Recording(sink).coverage
    assert coverage.missing == [("relu", "inside a compiled region")]
    assert coverage.fired == ["(root)", "conv1", "fc"] and not coverage.complete
    assert (
        str(coverage) == "3 of 4 selected modules were seen; not seen, or not whole:\n  relu: inside a compiled region"
    )


def test_saving_a_recording_keeps_all_of_it(build: Build, tmp_path: Path) -> None:
    def write(sink: Writer) -> None:
        three_steps(sink)
        sink.write_tensor("t", np.arange(4.0))
        sink.write_calls(calls_batch(call(900, 9)))
        sink.write_values(values_batch(value(901, 900, 9, tensor="t")))

    recording = build(write)
    recording.save(tmp_path / "copy.thk")
    copy = open_recording(tmp_path / "copy.thk")
    for table in ("calls", "values", "modules"):
        assert copy.table(table).to_pylist() == recording.table(table).to_pylist()
    assert copy["conv1"].calls[-1].output.tolist() == [0, 1, 2, 3] and copy.manifest.complete


def test_an_unknown_table_is_refused(build: Build) -> None:
    with pytest.raises(RecordingError, match="no table 'rows' in a recording; the tables are calls, values, modules"):
        build(three_steps).table("rows")
