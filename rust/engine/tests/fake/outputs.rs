//! Outputs of requests, collected over steps.

use std::collections::BTreeMap;

use ferrule_engine::{FinishReason, Hypothesis, RequestId, SampleTrace, StepOutput, TokenLogprobs};

/// Collected outputs of a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Got {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    pub trace: Vec<SampleTrace>,
    pub beams: Vec<Hypothesis>,
    pub finish: Option<FinishReason>,
}

/// Adds the outputs of a step to those of their requests.
pub fn collect(got: &mut BTreeMap<RequestId, Got>, outputs: Vec<StepOutput>) {
    for output in outputs {
        let got = got.get_mut(&output.request).expect("an output for a request that is not there");
        assert_eq!(got.finish, None, "an output after the end");
        got.tokens.extend(output.token_ids);
        got.logprobs.extend(output.logprobs);
        got.prompt_logprobs.extend(output.prompt_logprobs);
        got.trace.extend(output.trace);
        got.beams.extend(output.beams);
        got.finish = output.finish;
    }
}
