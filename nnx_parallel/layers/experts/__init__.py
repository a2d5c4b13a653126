"""A mixture of experts: routing, dispatch to experts, and the exchange between devices.

`routing` holds the numbers of a mixture and a token's choice. `dispatch` sorts tokens
by expert and multiplies. `ragged` sends rows to the devices of their experts. Start
reading in `moe`.
"""
