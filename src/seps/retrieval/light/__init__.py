"""An embedded model as vectors of length one, without torch: sentences in NumPy, pictures by ONNX Runtime."""
