"""What a run will take, known before anything is loaded."""

import pytest
import torch

from ebbtide.errors import UserError
from ebbtide.planner.host_memory import check_weights_fit


@pytest.mark.parametrize("change", [{"model.scratch.vocabulary": 10**9}, {"model.scratch.hidden": 2**20}])
def test_a_model_without_room_is_refused_before_it_is_built(tiny, change) -> None:
    with pytest.raises(
        UserError, match=r"parameters need [\d,.]+ GiB, but this machine has [\d.]+ GiB free: choose a smaller `model`"
    ):
        check_weights_fit(tiny(change), torch.device("cpu"))


def test_a_model_with_room_is_not(tiny) -> None:
    check_weights_fit(tiny(), torch.device("cpu"))
