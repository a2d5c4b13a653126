"""A mixture of experts: routing, dispatch to experts, and the exchange between devices.

`routing` holds the settings of a mixture and chooses the experts of a token. `dispatch`
sorts tokens by expert and multiplies. `ragged` sends rows to the devices of their
experts. Start reading in `moe`.
"""

from nnx_parallel.layers.experts.routing import Experts as Experts
