"""Communication: the mesh, the layout of a sequence over devices, and rotation along a ring."""
