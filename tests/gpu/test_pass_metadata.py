"""The attention metadata of a pass over layers with keys and values of different sizes, one of which shares another's
cache."""

import pytest
import torch
from test_paged_kernels import DEVICE, INTERPRETED, NEAR, integers, reference

from ebbtide.model.attention_kind import AttentionKind
from ebbtide.rollout.paged.cache_costs import LayerCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")]

BLOCK, PROMPT, HEADS = 16, 21, 4
KIND = AttentionKind(window=9)


def test_layers_have_sizes_of_their_own_and_may_share_a_cache() -> None:
    from ebbtide.rollout.paged.attention import CacheLayout, KVCache
    from ebbtide.rollout.paged.attn_metadata import DecodeMetadata, PrefillMetadata

    torch.manual_seed(0)
    layout = CacheLayout({0: LayerCache(2, 16, 16), 2: LayerCache(1, 32, 24)}, {0: 0, 2: 2, 3: 2}, 4)
    cache = KVCache([torch.zeros(shape, device=DEVICE) for shape in layout.shapes(4 * BLOCK)], layout)
    addresses = torch.tensor(cache.addresses(), device=DEVICE)
    assert addresses.shape == (4, 2)
    assert torch.equal(addresses[2], addresses[3])
    slots = [3 * BLOCK + place for place in range(BLOCK)] + [BLOCK + place for place in range(PROMPT - BLOCK)]
    prompt_tables, own_tables = integers([[3, 1]]), integers([[2]])
    prefill = PrefillMetadata(
        addresses, layout, BLOCK, integers(slots), integers([0] * PROMPT), torch.arange(PROMPT, device=DEVICE),
        integers([[0, 0]]), integers([[0, PROMPT, 0, PROMPT]]), prompt_tables, own_tables,
    )  # fmt: skip
    decode = DecodeMetadata(
        addresses, layout, BLOCK, integers([2 * BLOCK]), integers([0]), torch.tensor([PROMPT], device=DEVICE),
        integers([0, 1]), integers([0]), prompt_tables, integers([PROMPT]), own_tables, integers([1]),
        integers([PROMPT]), 1,
    )  # fmt: skip
    kept = {}
    for layer in (0, 2, 3):
        sizes = layout.read_by(layer)
        query = torch.randn(PROMPT + 1, HEADS, sizes.key_channels, device=DEVICE)
        key, value = (
            torch.randn(PROMPT + 1, sizes.kv_heads, channels, device=DEVICE)
            for channels in (sizes.key_channels, sizes.value_channels)
        )
        found = [
            one.attend(layer, query[part], key[part], value[part], 0.3, KIND)
            for one, part in ((prefill, slice(PROMPT)), (decode, slice(PROMPT, None)))
        ]
        kept[layer] = (key, value) if layer in layout.own else kept[layout.sources[layer]]
        wanted = reference(query, *kept[layer], 0.3, 0, KIND)
        torch.testing.assert_close(torch.cat(found), wanted, **NEAR[torch.float32])
