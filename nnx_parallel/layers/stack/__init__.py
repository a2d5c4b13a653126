"""`Stack`: N equal blocks as one module.

`build` stacks the arrays of N blocks. `scan` runs the layers in order, with remat.
`gather` gathers the parameters of one layer at a time, in any loop of a traced loss.
`residuals` traces a layer and finds the values that its backward pass needs. Start
reading in `stack`.
"""
