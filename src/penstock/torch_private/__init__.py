"""Every use of torch's private interfaces stands in this folder: they move between versions.

graph           what an fx node's op does, by its schema
functionalized  calls of ops that write into their arguments
emission        the compiler's final nodes as plain data
inductor        lowerings, the hook before emission, compilation
cpp_compiler    which C++ compiler Inductor will call
loader          compiled packages, loaded and called
pytree          specs of nested arguments

tests/torch_private tries every one of them and names the one that broke.
"""
