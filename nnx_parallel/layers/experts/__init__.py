"""A mixture of experts: routing, dispatch to experts, and the exchange between devices.

`routing` holds the settings of a mixture and chooses the experts of a token. `dispatch`
sorts tokens by expert and computes the experts' products. `ragged` sends rows to the
devices of their experts. `moe` combines these modules in a layer: start reading there.
"""

from nnx_parallel.layers.experts.routing import Experts as Experts
