"""Block keys: chains, roots and what they must tell apart."""

from hypothesis import given
from hypothesis import strategies as st

from cache.keys import KEY_BYTES, KeyRoot, key_root

SECRET = b"s" * 32
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def root(
    domain: str = "", fingerprint: str = "m", secret: bytes = SECRET, block_size: int = 4
) -> KeyRoot:
    return key_root(secret, fingerprint, domain, block_size)


def test_only_full_blocks_have_keys() -> None:
    assert root().keys([1, 2, 3]) == []
    keys = root().keys(list(range(9)))
    assert len(keys) == 2
    assert all(len(key) == KEY_BYTES for key in keys)


@given(tokens, tokens)
def test_equal_prefixes_and_only_they_share_keys(first: list[int], second: list[int]) -> None:
    pairs = zip(root().keys(first), root().keys(second), strict=False)
    for count, (left, right) in enumerate(pairs, start=1):
        assert (left == right) == (first[: count * 4] == second[: count * 4])


@given(tokens, st.integers(0, 40))
def test_a_chain_extended_in_parts_equals_one_pass(ids: list[int], cut: int) -> None:
    head = ids[: cut // 4 * 4]
    keys = root().keys(head)
    keys += root().extend(keys[-1] if keys else root().root, ids[len(head) :])
    assert keys == root().keys(ids)


def test_secret_model_domain_and_block_size_separate_chains() -> None:
    roots = [
        root(),
        root(domain="tenant"),
        root(fingerprint="other"),
        root(secret=b"t" * 32),
        root(block_size=8),
        # Parts must not run together: "m" + "" is not "" + "m".
        root(domain="m", fingerprint=""),
    ]
    ids = list(range(8))
    assert len({item.root for item in roots}) == len(roots)
    assert len({item.keys(ids)[0] for item in roots}) == len(roots)


def test_the_secret_does_not_show() -> None:
    assert "ssss" not in repr(root())
