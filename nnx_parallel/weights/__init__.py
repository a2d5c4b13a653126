"""Reads weights from folders of safetensors files onto a mesh, and writes folders."""

from nnx_parallel.weights.adapters import load_adapters as load_adapters
from nnx_parallel.weights.adapters import save_adapters as save_adapters
from nnx_parallel.weights.export import save_pretrained as save_pretrained
from nnx_parallel.weights.export import save_safetensors as save_safetensors
from nnx_parallel.weights.hub import push_to_hub as push_to_hub
from nnx_parallel.weights.names import Entry as Entry
from nnx_parallel.weights.pretrained import Pretrained as Pretrained
from nnx_parallel.weights.transfer import reshard as reshard
