"""What a comparison of a call's arguments with those of an earlier call must tell apart, for all that compare."""

from collections.abc import Callable

import pytest
import torch

from gdn_multi import dispatch, env

BF16, F16 = torch.bfloat16, torch.float16


def surroundings() -> dispatch.Surroundings:
    return dispatch.Surroundings(env.raw, env.deciding_keys, env.deciding())


def arguments() -> list:
    return [
        torch.zeros(3, 2, 8, dtype=BF16), None, torch.zeros(3, 2), (torch.zeros(2, dtype=torch.int32), torch.zeros(3)), 0.25, True, 64,
        "auto", torch.zeros(2, 1, 4, 4, dtype=torch.float8_e4m3fn),
    ]  # fmt: skip


#: By place in ``arguments``, what is not like the one there.
OTHERS = {
    0: (torch.zeros(4, 2, 8, dtype=BF16), torch.zeros(3, 2, 8, dtype=F16), torch.zeros(3, 2, 9, dtype=BF16)[..., :8],
        torch.zeros(3, 2, 8, dtype=BF16, device="meta"), None, 1, (torch.zeros(3, 2, 8, dtype=BF16),)),
    1: (torch.zeros(1), 0, False),
    2: (torch._neg_view(torch.zeros(3, 2)), torch.zeros(3, 2).requires_grad_(), torch.zeros(3, 2).numpy(), torch.eye(3, 2).to_sparse()),
    3: (None, arguments()[3][:1], (*arguments()[3], None), (None, torch.zeros(3)), list(arguments()[3]), torch.zeros(2),
        (torch.zeros(2), torch.zeros(3)), (torch.zeros(2, dtype=torch.int32), torch.zeros(3).requires_grad_())),
    4: (0.5, None, "0.25", torch.tensor(0.25), [0.25]), 5: (1, False, 1.0), 6: (64.0, 65, None), 7: ("cuda", None),
    8: (torch.zeros(2, 1, 4, 4, dtype=torch.float8_e5m2), torch.zeros(2, 1, 4, 4, dtype=torch.uint8)),
}  # fmt: skip


def check_tells_apart(like: Callable[[tuple], Callable[[tuple], bool]]) -> None:
    """``like(values)`` gives the comparison with ``values``."""
    same = like(tuple(arguments()))
    assert same(tuple(arguments())) is True
    name, scale = "".join(["au", "to"]), sum([0.125, 0.125])
    assert same((*arguments()[:4], scale, *arguments()[5:7], name, arguments()[8])) is True
    for place, values in OTHERS.items():
        for value in values:
            given = arguments()
            given[place] = value
            assert same(tuple(given)) is False, (place, value)
    assert same(()) is False and same(tuple(arguments()[:-1])) is False
    one = torch.zeros(1, 3)
    assert like((one,))((one.as_strided((1, 3), (7, 1)),)) is False, "to the last stride"
    spread = torch.zeros(1).expand(2, 2)
    assert like((spread,))((torch.eye(2).to_sparse(),)) is False, "whose strides are 0, too"


def check_follows_variables_and_modes(like: Callable[[tuple], Callable[[tuple], bool]]) -> None:
    given = (torch.nn.Parameter(torch.zeros(3)), 1.0)
    same = like(given)
    assert same(given) is False
    with torch.no_grad():
        assert same(given) is True
        for variable in env._DECIDING:
            with pytest.MonkeyPatch.context() as changed:
                changed.setenv(variable, "1")
                assert same(given) is False, variable
        assert same(given) is True


def check_keeps_nothing_alive(like: Callable[[tuple], Callable[[tuple], bool]], count: Callable[[object], int]) -> None:
    x, scale = torch.zeros(3), float("0.125")
    before = count(x), count(scale)
    same = like((x, (x,), scale))
    assert (count(x), count(scale)) == (before[0], before[1] + 1)
    assert same((x, (x,), scale)) is True
    del same
    assert (count(x), count(scale)) == before
