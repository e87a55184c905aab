"""All uses of torch's private interfaces are in this folder, because they move between versions.

graph           what an fx node's op does, by its schema
functionalized  calls of ops that write into their arguments
emission        the compiler's final nodes as plain data
inductor        lowerings, the hook before emission, compilation
cpp_compiler    which C++ compiler Inductor will call
archive_layout  where the code lies in a .pt2
loader          compiled packages, loaded and called
pytree          specs of nested arguments
wrapper_text    the C++ text that Inductor writes, as plain data
c_abi           the names that our C++ sources use
versions        which versions of torch were tested

tests/torch_private tries every one of them and names the one that broke. A scan of the sources there keeps every other
folder free of them.
"""
