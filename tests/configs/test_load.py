"""Files, presets, and what a user is told about a mistake."""

import contextlib
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import yaml_source
from configs.load import ConfigError, dump, load, parse, preset_names
from configs.shoal import ModelConfig, ShoalConfig

HEAD = "models:\n- name: a\n"


def problems(text: str) -> list[tuple[int, str, str]]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    return [(each.line, each.path, each.message) for each in caught.value.problems]


@pytest.mark.parametrize("name", ["local-cpu", "single-gpu", "cluster"])
def test_presets_load(name):
    assert name in preset_names()
    config = load(name)
    assert parse(dump(config), "again") == config


def test_what_presets_say():
    assert load("local-cpu").models[0].placement.num_gpus == 0
    assert load("local-cpu").ingress.host == "127.0.0.1"
    assert load("single-gpu").models[0].placement.num_gpus == 1
    assert load("cluster").models[0].replicas > 1
    assert load("cluster").models[0].autoscaling.max_replicas == 4


def test_units_in_a_file():
    config = parse(
        HEAD + "  engine: {cache: {memory_bytes: 64GiB}}\n"
        "  supervision: {stall_s: 2m, poll_interval_s: 0.25}\n"
        "router: {default_prefill_tokens_per_s: 1e3}\n",
        "f",
    )
    model = config.models[0]
    assert model.engine.cache.memory_bytes == 64 << 30
    assert (model.supervision.stall_s, model.supervision.poll_interval_s) == (120.0, 0.25)
    assert config.router.default_prefill_tokens_per_s == 1000.0
    assert parse(dump(config), "again") == config


@pytest.mark.parametrize(
    ("text", "line", "path", "nearest"),
    [
        (HEAD + "routr: {}\n", 3, "routr", "router"),
        (HEAD + "\n# note\ningress:\n  prt: 1\n", 6, "ingress.prt", "port"),
        (HEAD + "  replica: 2\n", 3, "models[0].replica", "replicas"),
        (HEAD + "  engine:\n    modle: x\n", 4, "models[0].engine.modle", "model"),
        (
            HEAD + "- name: b\n  engine:\n    cache:\n      block-size: 4\n",
            6,
            "models[1].engine.cache.block-size",
            "block_size",
        ),
        (HEAD + "  num_gpus: 1\n", 3, "models[0].num_gpus", "placement.num_gpus"),
        (HEAD + "policy: prefix\n", 3, "policy", "router.policy"),
        (HEAD + "registry: {port: 1}\n", 3, "registry.port", "ingress.port"),
    ],
)
def test_an_unknown_key_has_its_line_and_the_nearest_name(text, line, path, nearest):
    assert problems(text) == [(line, path, f"unknown key; did you mean {nearest}?")]


def test_an_unknown_key_like_no_other():
    ((_, _, message),) = problems(HEAD + "router: {zzz: 1}\n")
    assert message.startswith("unknown key; known here: policy, tie_fraction,")


@pytest.mark.parametrize(
    ("text", "line", "path", "message"),
    [
        ("ingress: {port: 80000}", 3, "ingress.port", "must be at most 65535, got 80000"),
        ("ingress: {port: '1'}", 3, "ingress.port", 'must be a valid integer, got "1"'),
        ("ingress: {replicas: true}", 3, "ingress.replicas", "must be a valid integer, got true"),
        ("ingress: {host: 5}", 3, "ingress.host", "must be a valid string, got 5"),
        ("ingress:", 3, "ingress", "must be a section with keys, got nothing"),
        (
            "ingress:\n  max_body_bytes: 4B",
            4,
            "ingress.max_body_bytes",
            "must be at least 1KiB, got 4",
        ),
        ("registry: {lease_s: 2h}", 3, "registry.lease_s", "must be at most 1h, got 2h"),
        (
            "registry: {lease_s: 5sec}",
            3,
            "registry.lease_s",
            "unknown unit 'sec'; one of us, ms, s, m, h, d (write it like 10m; a plain number "
            'counts seconds), got "5sec"',
        ),
        (
            "ingress: {proxy: nginx}",
            3,
            "ingress.proxy",
            "must be 'auto', 'haproxy' or 'python', got \"nginx\"",
        ),
        ("- {replicas: 1}", 3, "models[1].name", "is required"),
        ("- {name: a}", 3, "models[1].name", "the name 'a' is taken by models[0]"),
        (
            "- name: b\n  placement: {num_cpus: 0}",
            4,
            "models[1].placement.num_cpus",
            "num_cpus and num_gpus are both 0",
        ),
        (
            "ingress: {port: 1}\nrouter: {}\ningress: {}",
            5,
            "ingress",
            "given twice (first on line 3)",
        ),
        ("1: {}", 3, "", "a key must be text (put quotes around it)"),
        ("<<: {}", 3, "", "merge keys (<<) are not read; write the keys out"),
    ],
)
def test_a_bad_value_is_named_with_its_limit(text, line, path, message):
    assert problems(HEAD + text + "\n") == [(line, path, message)]


def test_everything_wrong_is_told_in_the_order_of_the_file():
    text = (
        "models:\n- name: a\n  replicas: 0\n- name: b\n  aliases: [7, a]\n"
        "ingress: {port: 0, port: 1}\nroute: {}\nregistry: {lease_s: x}\n"
    )
    assert [line for line, _, _ in problems(text)] == [3, 5, 5, 6, 6, 7, 8]
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    assert isinstance(caught.value, ValueError)
    first, *rest = str(caught.value).splitlines()
    assert first == "f.yaml:3: models[0].replicas: must be at least 1, got 0"
    assert len(rest) == 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "`models` is required"),
        ("- 1", "`models` is required"),
        ("router: {}", "is required"),
        ("models: []", "at least 1 item"),
        ("a: [", "not valid YAML"),
        ("a: 1\n---\nb: 1", "not valid YAML"),
        ("a: !!python/object/apply:os.system [x]", "not understood"),
        ("a: &a [*a]", "nested too deeply"),
        ("[" * 50_000, "nested too deeply"),
        ("\x01", "not valid YAML"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{k}: &{k} [{','.join(['*' + j] * 10)}]\n"
                for j, k in zip("abcdef", "bcdefg", strict=True)
            ),
            "unfolds",
        ),
    ],
)
def test_what_is_no_configuration(text, words):
    assert any(words in message for _, _, message in problems(text))


def test_files(tmp_path):
    path = tmp_path / "shoal.yaml"
    path.write_text(HEAD)
    assert load(str(path)).models[0].name == "a"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(str(path))
    path.write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="larger than"):
        load(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        load(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="Is a directory"):
        load(str(tmp_path))
    with pytest.raises(ConfigError, match="did you mean 'single-gpu'"):
        load("single-gpus")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1e3", 1000.0),
        ("012", 12),
        ("0x10", 16),
        ("0o17", 15),
        ("-5", -5),
        ("~", None),
        ("True", True),
        ("'1'", "1"),
        ("|\n  a\n", "a\n"),
    ],
)
def test_scalars_are_what_yaml_1_2_says(text, value):
    parsed = yaml_source.parse(f"a: {text}", "f").value["a"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_an_alias_is_read_where_it_stands():
    config = parse(
        "models:\n- {name: a, supervision: &s {stall_s: 1m}}\n- {name: b, supervision: *s}", "f"
    )
    assert config.models[1].supervision.stall_s == 60.0


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 62), 1 << 62)
        | st.floats(-1e18, 1e18)
        | st.text(string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", "")),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(string.ascii_letters, min_size=1), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_what_is_dumped_reads_back(value):
    source = yaml_source.parse(yaml_source.dump({"value": value}), "f")
    assert source.problems == []
    assert source.value == {"value": value}


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,20}", fullmatch=True))
def test_any_model_name_survives_yaml(name):
    config = ShoalConfig(models=[ModelConfig(name=name)])
    assert parse(dump(config), "f") == config


@given(st.text(max_size=60))
def test_no_text_makes_the_parser_raise_anything_else(text):
    with contextlib.suppress(ConfigError):
        parse(text, "f")
