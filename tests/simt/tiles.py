"""A pytest plugin: attention has the tiles that it was built with."""

from tests.simt.run import use_tiles

use_tiles()
