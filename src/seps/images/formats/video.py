"""Videos as pictures: frames at fixed times, each named by its time code.

A video takes part like a tar shard: its frames are members, named "00:01:20". Which there are depends on its length
alone, so that an unchanged file has the same frames in every run. Opening reads the head of a file and decoding starts
at the last key frame before the time; both are bounded, whatever the file says of itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seps.images.formats import VIDEO, MissingReader, suffix_of

SECONDS_APART = 10.0
"""Seconds between two frames of a video; more in one so long that it would have more than `MOST_FRAMES`."""
MOST_FRAMES = 40
LONGEST = 1e6
"""Seconds; a file that claims more does not know its length."""
MAX_FRAME_PIXELS = 89_478_485
MOST_PACKETS = 600
"""Packets that are decoded from a key frame on in search of a time; then the last frame so far stands for it."""
_CODE = re.compile(r"(\d{2,}):([0-5]\d):([0-5]\d)")
# Named by suffix and never guessed: some of FFmpeg's formats are lists of other files and addresses to read.
_CONTAINERS = {
    **dict.fromkeys((".mp4", ".m4v", ".mov", ".3gp", ".3g2"), "mp4"),
    **dict.fromkeys((".mkv", ".webm"), "matroska"),
    **dict.fromkeys((".mts", ".m2ts"), "mpegts"),
    **dict.fromkeys((".mpg", ".mpeg"), "mpeg"),
    ".avi": "avi",
    ".wmv": "asf",
}


def time_code(seconds: float) -> str:
    """Whole seconds as hours, minutes and seconds: "00:01:20"."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def seconds_of(code: str) -> int:
    """The seconds of a time code. Raises ValueError for what is none."""
    match = _CODE.fullmatch(code)
    if match is None:
        raise ValueError(f"{code!r} is no time in a video; times look like 00:01:20")
    hours, minutes, seconds = map(int, match.groups())
    return 3600 * hours + 60 * minutes + seconds


def sampled_times(seconds: float) -> list[str]:
    """The time codes of a video of this length, in order: the middles of equal parts."""
    count = min(MOST_FRAMES, max(1, math.ceil(seconds / SECONDS_APART)))
    return list(dict.fromkeys(time_code((part + 0.5) * seconds / count) for part in range(count)))


def frame_times(path: Path) -> list[str]:
    """The time codes of a video's frames. Raises ValueError where it cannot be opened, MissingReader without PyAV."""
    with _opened(path) as (container, stream):
        if stream.duration is not None and stream.time_base is not None:
            seconds = float(stream.duration * stream.time_base)
        else:
            seconds = (container.duration or 0) / 1e6
    return sampled_times(seconds if 0 <= seconds <= LONGEST else 0.0)


def read_frame(path: Path, code: str) -> bytes:
    """The frame of a video that is shown at a time, upright, as the bytes of a PPM picture.

    Raises ValueError where there is none, MissingReader without PyAV.
    """
    wanted = seconds_of(code)
    with _opened(path) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > MAX_FRAME_PIXELS:
            raise ValueError(f"its frames have {width} x {height} pixels, too many to decode")
        stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
        stream.codec_context.skip_frame = "NONREF"  # frames that no other needs are not worth their time
        frame = _frame_at(container, stream, wanted)
        if frame is None:
            raise ValueError(f"no frame can be decoded at {code}")
        return _ppm(frame)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream."""
    try:
        import av
    except ImportError as error:
        raise MissingReader(VIDEO) from error
    if not path.is_file():
        raise FileNotFoundError(f"there is no such file: {path.name}")
    try:
        with av.open(
            os.fspath(path),
            format=_CONTAINERS[suffix_of(path)],
            options={"protocol_whitelist": "file"},
            metadata_errors="replace",
        ) as container:
            stream = next(iter(container.streams.video), None)
            if stream is None or stream.codec_context is None:
                raise ValueError("it holds no video that can be decoded")
            yield container, stream
    except (av.FFmpegError, EOFError) as error:
        raise ValueError(f"the video is damaged or cut short ({getattr(error, 'strerror', None) or error})") from error


def _frame_at(container: Any, stream: Any, seconds: int) -> Any:
    """The last frame that begins at or before a time; the first of all where none does."""
    target = (stream.start_time or 0) + int(seconds / stream.time_base)
    frame = None
    # Some containers have no list of their key frames, and a seek may end behind the one that is needed.
    for earlier in (0, 10, None):
        if earlier is None or seconds <= earlier:
            container.seek(0, backward=True)
        else:
            container.seek(target - int(earlier / stream.time_base), stream=stream, backward=True)
        frame = _decoded_up_to(container, stream, target)
        if frame is not None and (frame.pts is None or frame.pts <= target):
            break
    return frame


def _decoded_up_to(container: Any, stream: Any, target: int) -> Any:
    import av

    best = None
    for number, packet in enumerate(container.demux(stream)):
        try:
            frames = packet.decode()
        except av.FFmpegError:  # one damaged packet; what follows may be whole
            frames = []
        for frame in frames:
            if best is not None and frame.pts is not None and frame.pts > target:
                return best
            best = frame
        if number >= MOST_PACKETS:
            break
    return best


def _ppm(frame: Any) -> bytes:
    pixels = frame.to_ndarray(format="rgb24")
    # Of the display matrix, counter-clockwise: how a phone was held.
    pixels = np.ascontiguousarray(np.rot90(pixels, round((frame.rotation or 0) / 90) % 4))
    height, width = pixels.shape[:2]
    return b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()
