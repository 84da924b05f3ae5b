/* What the Python bindings of full TensorRT want of its libraries, to be imported without them. Each object is set by the tests. */
void *bindings_registry, *bindings_builder, *bindings_runtime;

void *getPluginRegistry(void) { return bindings_registry; }
void *getBuilderPluginRegistry(int capability) { return bindings_registry; }
void *createInferBuilder_INTERNAL(void *logger, int version) { return bindings_builder; }
void *createInferRuntime_INTERNAL(void *logger, int version) { return bindings_runtime; }

#define NOTHING(name) void *name(void) { return 0; }
NOTHING(createInferRefitter_INTERNAL)
NOTHING(createNvOnnxParser_INTERNAL)
NOTHING(createNvOnnxParserRefitter_INTERNAL)
NOTHING(getNvOnnxParserVersion)
NOTHING(initLibNvInferPlugins)
