// SPDX-License-Identifier: Apache-2.0
/* A stand-in for the vendor's runtime, for tests alone: it is never put into a bundle.
 *
 * It offers the functions rknn-toolkit-lite2 looks up, for one made-up model: an input of 8 floats and an output
 * of 4, output[j] = (j + 1) * (input[0] + ... + input[7]). Misuse is answered with a negative code, and the end
 * of the process tells on stderr what was called.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INPUTS = 8, OUTPUTS = 4 };
enum { FAIL = -1, PARAM_INVALID = -5, CTX_INVALID = -7 };
enum { QUERY_IN_OUT_NUM = 0, QUERY_INPUT_ATTR = 1, QUERY_OUTPUT_ATTR = 2, QUERY_SDK_VERSION = 5 };
enum { TENSOR_UNDEFINED = 3, TENSOR_FLOAT32 = 0 };

typedef struct {
    uint32_t index, n_dims, dims[16];
    char name[256];
    uint32_t n_elems, size;
    int32_t fmt, type, qnt_type;
    int8_t fl;
    int32_t zp;
    float scale;
    uint32_t w_stride, size_with_stride;
    uint8_t pass_through;
    uint32_t h_stride;
} tensor_attr;
_Static_assert(sizeof(tensor_attr) == 376, "the size the toolkit asks with");

typedef struct {
    uint32_t index;
    void *buf;
    uint32_t size;
    uint8_t pass_through;
    int32_t type, fmt;
} input;

typedef struct {
    uint8_t want_float, is_prealloc;
    uint32_t index;
    void *buf;
    uint32_t size;
} output;

static const uint64_t CONTEXT = 0x5ca1ab1e;
static float values[INPUTS], results[OUTPUTS];
static int open_contexts, runs;

__attribute__((destructor)) static void tell(void) {
    fprintf(stderr, "stub: %d runs, %d contexts left open\n", runs, open_contexts);
}

int rknn_init(uint64_t *context, void *model, uint32_t size, uint32_t flag, void *extend) {
    if (!context || !model || !size)
        return PARAM_INVALID;
    *context = CONTEXT;
    open_contexts++;
    return 0;
}

int rknn_destroy(uint64_t context) {
    if (context != CONTEXT || !open_contexts)
        return CTX_INVALID;
    open_contexts--;
    return 0;
}

int rknn_set_core_mask(uint64_t context, int mask) {
    return context == CONTEXT ? 0 : CTX_INVALID;
}

int rknn_set_input_shapes(uint64_t context, uint32_t count, void *attrs) {
    return FAIL;
}

static int attribute(tensor_attr *attr, const char *name, uint32_t elements) {
    if (attr->index)
        return PARAM_INVALID;
    memset(attr, 0, sizeof *attr);
    attr->n_dims = 2;
    attr->dims[0] = 1;
    attr->dims[1] = elements;
    strcpy(attr->name, name);
    attr->n_elems = elements;
    attr->size = attr->size_with_stride = elements * sizeof(float);
    attr->fmt = TENSOR_UNDEFINED;
    attr->type = TENSOR_FLOAT32;
    attr->scale = 1.0f;
    return 0;
}

int rknn_query(uint64_t context, int command, void *info, uint32_t size) {
    if (context != CONTEXT)
        return CTX_INVALID;
    if (command == QUERY_IN_OUT_NUM && size >= 8) {
        ((uint32_t *)info)[0] = ((uint32_t *)info)[1] = 1;
        return 0;
    }
    if (command == QUERY_INPUT_ATTR && size == sizeof(tensor_attr))
        return attribute(info, "x", INPUTS);
    if (command == QUERY_OUTPUT_ATTR && size == sizeof(tensor_attr))
        return attribute(info, "y", OUTPUTS);
    if (command == QUERY_SDK_VERSION && size >= 512) {
        strcpy(info, "0.0.0 (stand-in)");
        strcpy((char *)info + 256, "0.0.0 (stand-in)");
        return 0;
    }
    return PARAM_INVALID;
}

int rknn_inputs_set(uint64_t context, uint32_t count, input *inputs) {
    if (context != CONTEXT)
        return CTX_INVALID;
    if (count != 1 || inputs[0].index || inputs[0].type != TENSOR_FLOAT32 || inputs[0].size != sizeof values)
        return PARAM_INVALID;
    memcpy(values, inputs[0].buf, sizeof values);
    return 0;
}

int rknn_run(uint64_t context, void *extend) {
    if (context != CONTEXT)
        return CTX_INVALID;
    float sum = 0.0f;
    for (int i = 0; i < INPUTS; i++)
        sum += values[i];
    for (int j = 0; j < OUTPUTS; j++)
        results[j] = (float)(j + 1) * sum;
    runs++;
    return 0;
}

int rknn_outputs_get(uint64_t context, uint32_t count, output *outputs, void *extend) {
    if (context != CONTEXT)
        return CTX_INVALID;
    if (count != 1 || !outputs[0].want_float || outputs[0].is_prealloc)
        return PARAM_INVALID;
    outputs[0].size = sizeof results;
    outputs[0].buf = malloc(sizeof results);
    if (!outputs[0].buf)
        return FAIL;
    memcpy(outputs[0].buf, results, sizeof results);
    return 0;
}

int rknn_outputs_release(uint64_t context, uint32_t count, output *outputs) {
    if (context != CONTEXT || count != 1)
        return CTX_INVALID;
    free(outputs[0].buf);
    return 0;
}
