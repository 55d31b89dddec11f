"""Tests that frames which the client writes in a faster way are those that the wire would write."""

from hypothesis import given
from hypothesis import strategies as st

from truenext.client.core import frames
from truenext.wire.stomp.frame import Frame, Version, encode

TEXT = st.text(alphabet=st.sampled_from("ab:\\\r\né"), max_size=4)


@given(st.sampled_from(["CONNECT", "COMMIT", "SUBSCRIBE"]), st.dictionaries(TEXT.filter(bool), TEXT, max_size=4))
def test_a_frame_without_a_body_is_written_as_the_wire_writes_it(command: str, headers: dict[str, str]) -> None:
    assert frames.encode_frame(command, headers) == encode(Frame(command, headers), Version.V1_2)
