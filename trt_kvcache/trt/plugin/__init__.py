"""``KVCacheAttention``: attention over a combined cache as a plugin. ``plugins/README.md`` describes its ABI.

Importing this package does not import TensorRT. No engine has run the plugin yet.
"""

from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.trt.plugin.aot import register_decode
from trt_kvcache.trt.plugin.creator import register
from trt_kvcache.trt.plugin.plugin import plugin_class
from trt_kvcache.trt.plugin.versions import allow_aliasing, can_add_plugins

__all__ = ["AttentionAttributes", "allow_aliasing", "can_add_plugins", "plugin_class", "register", "register_decode"]
