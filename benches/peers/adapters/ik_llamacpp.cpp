// C functions for ik_llamacpp.py, which `install` compiles against the checkout's llama.h: the layout of the library's
// parameter structures changes between its versions.

#include "llama.h"

extern "C" {

// Quantizes a GGUF file; returns 0 on success.
unsigned peer_quantize(const char * from, const char * to, int file_type, int threads) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = static_cast<llama_ftype>(file_type);
    params.nthread = threads;
    return llama_model_quantize(from, to, &params);
}

// Loads a model, or returns null. With `repack`, rows of the matrices are interleaved as by `--run-time-repack`.
llama_model * peer_model(const char * file, bool repack) {
    llama_model_params params = llama_model_default_params();
    params.use_mmap = !repack;
    params.repack_tensors = repack;
    return llama_model_load_from_file(file, params);
}

// Opens a context for `tokens` tokens of all sequences together, or returns null.
llama_context * peer_context(
    llama_model * model, int tokens, int sequences, int batch, int threads, int kv_type, bool flash_attention) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = tokens;
    params.n_seq_max = sequences;
    params.n_batch = params.n_ubatch = batch;
    params.n_threads = params.n_threads_batch = threads;
    params.type_k = params.type_v = static_cast<ggml_type>(kv_type);
    params.flash_attn = flash_attention;
    return llama_init_from_model(model, params);
}

// Evaluates rows, each with its own sequence; returns 0 on success.
int peer_decode(
    llama_context * context, int rows, llama_token * tokens, llama_pos * positions, llama_seq_id * sequences,
    int8_t * wanted) {
    llama_batch batch = llama_batch_init(rows, 0, 1);
    batch.n_tokens = rows;
    for (int row = 0; row < rows; ++row) {
        batch.token[row] = tokens[row];
        batch.pos[row] = positions[row];
        batch.n_seq_id[row] = 1;
        batch.seq_id[row][0] = sequences[row];
        batch.logits[row] = wanted[row];
    }
    const int status = llama_decode(context, batch);
    llama_batch_free(batch);
    return status;
}

}
