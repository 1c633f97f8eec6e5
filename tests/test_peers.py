"""benches/peers: figures of a comparison, and its child processes. No peer needs to be installed."""

import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from adapters.interface import Loaded, Timing
from child import Child, ChildError
from ferrule._loading.shapes import find_shape, shape_names
from gguf_convert import convert
from registry import PEERS as REGISTRY
from registry import Contender
from report import Ceilings, Measurement, Workload, record, rows, steady_rounds, table

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "benches" / "peers"

QUIET = Ceilings(read=10e9, int8=1e12, f32=2e11, adds=5e9)
WORKLOAD = Workload("llama-1b", layer_parameters=1_000_000_000, prompt=100, gen=10, threads=2, batch=1)
CONTENDERS = [
    ("ferrule:int4", Loaded("ferrule 1", 500_000_000, 400_000_000, 1000)),
    ("other:Q4", Loaded("other 2", 600_000_000, 600_000_000, 2000)),
]


def measured(prefill: float, decode: float, ceilings: Ceilings = QUIET) -> Measurement:
    return Measurement(Timing(prefill, decode, 10), ceilings)


ROUNDS = [
    [measured(1.0, 1.0), measured(2.0, 1.5)],
    [measured(0.5, 1.0), measured(3.0, 1.5)],
    [measured(2.0, 1.0), measured(4.0, 4.0)],
]


def test_speeds_and_fractions_are_medians() -> None:
    ferrule, other = rows(WORKLOAD, CONTENDERS, ROUNDS)
    assert ferrule.prefill_tokens_per_second == 100
    assert ferrule.prefill_peak_fraction == pytest.approx(100 * 2e9 / 1e12)
    assert ferrule.decode_tokens_per_second == 10
    # 400 MB of weights, and 1000 bytes for each of the 105 tokens that the context has on average.
    assert ferrule.decode_bandwidth_fraction == pytest.approx(10 * (400_000_000 + 105_000) / 10e9)
    assert other.decode_tokens_per_second == pytest.approx(10 / 1.5)
    assert other.total_bytes == 600_000_000


def test_ratios_are_computed_per_round() -> None:
    ferrule, other = rows(WORKLOAD, CONTENDERS, ROUNDS)
    assert (ferrule.prefill_ratio, ferrule.decode_ratio) == (1, 1)
    assert other.prefill_ratio == 2  # of 2, 6 and 2; the ratio of the medians is 3
    assert other.decode_ratio == 1.5  # of 1.5, 1.5 and 4


def test_batch_tokens_are_counted_together() -> None:
    workload = Workload("llama-1b", 1_000_000_000, prompt=100, gen=10, threads=2, batch=4)
    several = [[Measurement(Timing(4.0, 2.0, 40), QUIET), Measurement(Timing(8.0, 3.0, 40), QUIET)]]
    ferrule, other = rows(workload, CONTENDERS, several)
    assert (ferrule.prefill_tokens_per_second, ferrule.decode_tokens_per_second) == (100, 20)
    # The first token of each sequence counts here too; it was generated with the prompt.
    assert ferrule.total_tokens_per_second == pytest.approx(44 / 6)
    assert (ferrule.total_ratio, other.total_ratio) == (1, pytest.approx(11 / 6))
    # Weights are read once for all four.
    assert ferrule.decode_bandwidth_fraction == pytest.approx(20 * (100_000_000 + 105_000) / 10e9)


def test_rounds_with_bad_windows_are_excluded() -> None:
    bad = Ceilings(read=10e9, int8=1e12, f32=2e11, adds=0.8 * QUIET.adds)
    rounds = [*ROUNDS, [measured(1.0, 1.0), measured(9.0, 9.0, bad)]]
    assert steady_rounds(rounds) == ROUNDS
    assert steady_rounds([]) == []


def test_table_has_a_row_for_each_contender() -> None:
    lines = table(rows(WORKLOAD, CONTENDERS, ROUNDS)).splitlines()
    assert lines[2] == "| ferrule:int4 | 500 | 100.0 | 20% |  | 10.0 | 40% |  | 5.5 |  |"
    assert lines[3] == "| other:Q4 | 600 | 33.3 | 7% | 2.00x | 6.7 | 40% | 1.50x | 2.4 | 2.67x |"
    assert "ferrule:int4 is" in lines[0]


def test_record_has_all_rounds_and_counted_ceilings() -> None:
    bad = Ceilings(read=1e9, int8=1e11, f32=1e10, adds=1e9)
    rounds = [*ROUNDS, [measured(9.0, 9.0, bad), measured(9.0, 9.0, bad)]]
    made = record("compare.py a b", WORKLOAD, rows(WORKLOAD, CONTENDERS, ROUNDS), rounds, ROUNDS)
    read = json.loads(json.dumps(made))
    assert (read["rounds_run"], read["rounds_counted"]) == (4, 3)
    assert (read["read_gbps"], read["int8_gops"], read["model"]) == (10, 1000, "llama-1b")
    assert [row["contender"] for row in read["contenders"]] == ["ferrule:int4", "other:Q4"]
    assert read["rounds"][3][1]["timing"]["prefill_seconds"] == 9


def test_contenders_parse_and_format() -> None:
    assert Contender.parse("ferrule:int4/int8") == Contender("ferrule", "int4", "int8")
    assert [str(Contender.parse(text)) for text in ("openvino:int8", "ferrule:int4/int8")] == [
        "openvino:int8",
        "ferrule:int4/int8",
    ]


@pytest.mark.parametrize("text", ["nobody:Q4_0", "openvino", "openvino:", ":Q4_0", "openvino:/f16"])
def test_invalid_contender(text: str) -> None:
    with pytest.raises(ValueError, match=r"peer is|names no format"):
        Contender.parse(text)


def test_registered_peers_have_adapter_and_installer() -> None:
    installer = (PEERS / "install").read_text()
    for peer in REGISTRY.values():
        assert (PEERS / "adapters" / f"{peer.adapter}.py").is_file()
        assert f"    {peer.environment}) " in installer


def fake(tmp_path: Path, body: str) -> Child:
    return Child([sys.executable, "-c", body], {"GREETING": "hello"}, tmp_path / "log")


ECHO = """
import json, os, sys
print(json.dumps({"greeting": os.environ["GREETING"]}), flush=True)
for line in sys.stdin:
    if "stop" in line:
        sys.exit("enough")
    print(line, end="", flush=True)
"""


def test_child_process_protocol(tmp_path: Path) -> None:
    with fake(tmp_path, ECHO) as child:
        assert child.greeting == {"greeting": "hello"}
        assert child.ask(prompt=[1, 2], gen=3) == {"prompt": [1, 2], "gen": 3}


def test_child_exit_error_has_last_line_of_stderr(tmp_path: Path) -> None:
    with fake(tmp_path, ECHO) as child, pytest.raises(ChildError, match="ended with 1: enough"):
        child.ask(word="stop")
    with pytest.raises(ChildError, match="ended with 3: no such model"):
        fake(tmp_path, "import sys; print('no such model', file=sys.stderr); sys.exit(3)")


def test_measurement_through_adapter_server(tmp_path: Path) -> None:
    """Runs serve.py with an adapter that prints to stdout."""
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "interface.py").write_text((PEERS / "adapters" / "interface.py").read_text())
    (tmp_path / "adapters" / "chatty.py").write_text(
        "from adapters.interface import Loaded, Timing\n"
        "class Chatty:\n"
        "    loaded = Loaded('1', 2, 3, 4)\n"
        "    def measure(self, prompts, gen):\n"
        "        print('this would break the pipe')\n"
        "        return Timing(sum(map(len, prompts)), gen, gen)\n"
        "def load(job):\n"
        "    assert job.model.name == 'model'\n"
        "    return Chatty()\n"
    )
    (tmp_path / "serve.py").write_text((PEERS / "serve.py").read_text())
    job = {"model": "a/model", "work": "a", "format": "f", "kv": None, "threads": 1, "context": 8, "batch": 2}
    command = [sys.executable, str(tmp_path / "serve.py"), "chatty", json.dumps(job)]
    with Child(command, {}, tmp_path / "log") as child:
        assert Loaded(**child.greeting) == Loaded("1", 2, 3, 4)
        assert Timing(**child.ask(prompts=[[1, 2, 3], [4]], gen=5)) == Timing(4, 5, 5)


SMALL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "architectures": ["Qwen3ForCausalLM"],
}


HEADS = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
HYBRIDS = {
    "lfm2-1.2b": {**HEADS, "hidden_size": 64, "block_ff_dim": 96, "block_multiple_of": 16, "full_attn_idxs": [2]},
    "gemma4-e4b": {
        **HEADS,
        "hidden_size": 64,
        "head_dim": 16,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 300,
        "intermediate_size": 96,
    },
    "granite-4-h-tiny": {
        **HEADS,
        "hidden_size": 64,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "num_local_experts": 8,
        "intermediate_size": 32,
        "shared_intermediate_size": 32,
    },
    "nemotron-3-nano": {
        **HEADS,
        "hidden_size": 64,
        "head_dim": 16,
        "hybrid_override_pattern": "ME*M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
    },
    "qwen3.5-4b": {
        **HEADS,
        "hidden_size": 64,
        "head_dim": 32,
        "intermediate_size": 96,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
    },
}
"""Smaller sizes of shapes of hybrids."""
LAYER_PARAMETERS = {
    "lfm2-1.2b": 110592,
    "gemma4-e4b": 159744,
    "granite-4-h-tiny": 252928,
    "nemotron-3-nano": 103936,
    "qwen3.5-4b": 157184,
}
"""Weights of their layers' projections that a token uses, counted from the shapes of the tensors."""


def random_checkpoint(tmp_path: Path, shape: Mapping[str, object] = SMALL) -> Path:
    config = tmp_path / "shape.json"
    config.write_text(json.dumps(shape))
    generator = ROOT / "benches" / "random_checkpoint.py"
    subprocess.run([sys.executable, str(generator), str(config), str(tmp_path / "model")], check=True)
    return tmp_path / "model"


def test_random_checkpoint_parameters_and_variance(tmp_path: Path) -> None:
    import numpy as np

    model = random_checkpoint(tmp_path)
    data = (model / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__") == (
        len(data) - 8 - length
    )
    start, end = (8 + length + at for at in header["model.layers.1.mlp.down_proj.weight"]["data_offsets"])
    weights = (np.frombuffer(data[start:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert weights.var() * 96 == pytest.approx(1, abs=0.1)


@pytest.mark.native
@pytest.mark.parametrize("name", HYBRIDS)
def test_random_checkpoint_of_hybrid_loads_and_converts(name: str, tmp_path: Path) -> None:
    from ferrule import LLM, SamplingParams

    shape = json.loads((find_shape(name) / "config.json").read_text()) | HYBRIDS[name]
    model = random_checkpoint(tmp_path, shape)
    file = convert(model, tmp_path / "model.gguf", "BF16", tokenizer=False)
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    answers: list[list[int]] = []
    for each in (model, file):
        with LLM(each, quantization="f32") as llm:
            output = llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy)[0]
            answers.append(list(output.outputs[0].token_ids))
            assert llm.info()["layer_parameters_per_token"] == LAYER_PARAMETERS[name]
    assert answers[0] == answers[1]


def test_shapes_by_name(tmp_path: Path) -> None:
    generator = ROOT / "benches" / "random_checkpoint.py"
    command = [sys.executable, str(generator), "no-such-shape", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert ", ".join(shape_names()) in done.stderr.replace("\n", " ")


@pytest.mark.native
def test_random_checkpoint_loads_with_tokenizer(tmp_path: Path) -> None:
    from ferrule import LLM, SamplingParams

    with LLM(random_checkpoint(tmp_path)) as llm:
        assert llm.info()["tokenizer"]
        assert len(llm.tokenize("é")) == 2
        output = llm.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 3
