//! Loads a model and continues a prompt: token ids in, token ids out.
//!
//! ```sh
//! cargo run --release -p ferrule-engine --example generate -- \
//!     rust/engine/examples/tiny.json python/ferrule/models/tiny 1 2 3
//! ```
//!
//! The arguments are the spec of a model as JSON, its directory, and the token ids of a prompt. Python writes the spec of
//! any supported model: `ferrule.archs.model_spec(config).to_json()`.

use std::error::Error;
use std::process::ExitCode;

use ferrule_engine::{EngineBuilder, Request, SamplingParams};
use ferrule_kernels::Cancel;
use ferrule_model::{LanguageModel, ModelSpec};

/// Number of tokens to generate.
const MAX_TOKENS: usize = 16;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [spec, directory, prompt @ ..] = arguments.as_slice() else {
        eprintln!("usage: generate SPEC_JSON MODEL_DIRECTORY TOKEN_ID...");
        return ExitCode::from(2);
    };
    match generate(spec, directory, prompt) {
        Ok(tokens) => {
            println!("{tokens:?}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the greedy continuation of a prompt.
pub fn generate(spec: &str, directory: &str, prompt: &[String]) -> Result<Vec<u32>, Box<dyn Error>> {
    let spec = ModelSpec::from_json(&std::fs::read_to_string(spec)?)?;
    let mut engine = EngineBuilder::new(spec).weights(directory).kv_cache_memory(64 << 20).build()?;

    let ids = prompt.iter().map(|id| id.parse()).collect::<Result<Vec<i64>, _>>()?;
    let params = SamplingParams { temperature: 0.0, max_tokens: MAX_TOKENS, ..SamplingParams::default() };
    let vocab_size = engine.model().vocab_size();
    engine.add_request(Request::from_ids(&ids, vocab_size, params)?)?;

    let cancel = Cancel::new();
    let mut tokens = Vec::new();
    while engine.has_unfinished_requests() {
        for output in engine.step(&cancel)? {
            tokens.extend(output.token_ids);
        }
    }
    Ok(tokens)
}
