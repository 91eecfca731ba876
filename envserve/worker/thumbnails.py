"""Pictures of envs that are only to be looked at: small, as JPEG, made where they are.

Pillow is loaded when the first one is made.
"""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np

__all__ = ["thumbnail"]

_WIDTHS: Final = range(8, 1025)
_QUALITY: Final = 75


def thumbnail(picture: Any, width: int) -> bytes | None:
    """Returns a JPEG of so many pixels across; None for what is no picture.

    Args:
      picture: What an env renders: uint8 `[height, width, 3]`; of a list, the last.
      width: Pixels, from 8 to 1,024; narrower pictures stay as they are.
    """
    if width not in _WIDTHS:
        raise ValueError(f"width: expected 8 to 1024 pixels; got {width}")
    if isinstance(picture, list) and picture:
        picture = picture[-1]
    if getattr(picture, "dtype", None) != np.uint8 or picture.shape[2:] != (3,):
        return None
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "thumbnails need Pillow; pip install 'envserve[page]' where the envs run"
        ) from error
    image = Image.fromarray(picture)
    image.thumbnail((width, image.height))
    file = io.BytesIO()
    image.save(file, "jpeg", quality=_QUALITY)
    return file.getvalue()
