import random
import zlib

import pytest

from hf_zero.checkpoint.checksum import RangeChecksum, crc_of_whole


pytestmark = pytest.mark.quick


def ranges_of(data: bytes, cuts: list[int]) -> list[RangeChecksum]:
    edges = [0, *sorted(cuts), len(data)]
    return [RangeChecksum(begin, end - begin, zlib.crc32(data[begin:end])) for begin, end in zip(edges, edges[1:])]


@pytest.mark.parametrize("num_cuts", [0, 1, 2, 7])
def test_the_checksum_of_ranges_in_any_order_is_that_of_the_whole(num_cuts):
    generator = random.Random(num_cuts)
    for nbytes in (0, 1, 2, 4096, 65537):
        data = generator.randbytes(nbytes)
        ranges = ranges_of(data, [generator.randint(0, nbytes) for _ in range(num_cuts)])
        generator.shuffle(ranges)
        assert crc_of_whole(ranges, nbytes) == zlib.crc32(data)


def test_ranges_that_several_ranks_have_read_count_once():
    data = bytes(range(200))
    assert crc_of_whole([*ranges_of(data, [50]), *ranges_of(data, [50])], 200) == zlib.crc32(data)
    assert crc_of_whole([*ranges_of(data, [50]), *ranges_of(data, [70])], 200) is None


def test_a_gap_or_a_missing_end_gives_none():
    first, second, third = ranges_of(bytes(90), [30, 60])
    assert crc_of_whole([first, third], 90) is None
    assert crc_of_whole([first, second], 90) is None
    assert crc_of_whole([second, third], 90) is None
    assert crc_of_whole([], 90) is None


def test_one_changed_byte_changes_it():
    data = bytearray(random.Random(0).randbytes(1000))
    before = crc_of_whole(ranges_of(bytes(data), [400]), 1000)
    data[123] ^= 1
    assert crc_of_whole(ranges_of(bytes(data), [400]), 1000) != before
