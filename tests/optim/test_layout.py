"""The layout: every element once, in its place, within the limits."""

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.optim.layout import ALIGNMENT, pack_chunks, split_gpu_cpu

sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=20)


@given(sizes=sizes, fraction=st.floats(0, 1), limit=st.sampled_from([128, 256, 1024, 10**6]))
def test_every_element_has_one_place(sizes, fraction, limit) -> None:
    gpu_part, cpu_part = split_gpu_cpu(sizes, fraction)
    places = [set() for _ in sizes]
    for part in (gpu_part, cpu_part):
        for chunk in pack_chunks(part, limit):
            assert 0 < chunk.size <= limit
            used = 0
            for segment in chunk.segments:
                assert segment.offset % ALIGNMENT == 0
                assert segment.offset >= used
                used = segment.offset + segment.size
                stretch = set(range(segment.start, segment.stop))
                assert stretch
                assert not stretch & places[segment.parameter]
                places[segment.parameter] |= stretch
            assert used <= chunk.size
    assert [len(place) for place in places] == sizes
    on_cpu = sum(segment.size for segment in cpu_part)
    assert 0 <= on_cpu - round(fraction * sum(sizes)) < ALIGNMENT
    assert sum(segment.start > 0 for segment in cpu_part) <= 1  # at most one parameter is cut
    if gpu_part and cpu_part:
        assert gpu_part[-1].parameter <= cpu_part[0].parameter  # the last ones are the CPU's


def test_none_and_all() -> None:
    assert split_gpu_cpu([5, 7], 0.0)[1] == []
    assert split_gpu_cpu([5, 7], 1.0)[0] == []
