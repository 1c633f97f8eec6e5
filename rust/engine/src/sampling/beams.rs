//! Beam search candidates: the most likely continuations of a row, instead of one sampled token.

use super::logprobs::Softmax;
use super::{Candidates, Context, History, MODEL, SampleError, Sampler, filter};
use crate::SamplingParams;

/// A candidate continuation of a beam.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Continuation {
    /// The token.
    pub token: u32,
    /// Log-probability after the stages.
    pub logprob: f64,
}

impl Sampler {
    /// Returns the `count` most likely tokens at `position`, most likely first; fewer if fewer are allowed.
    ///
    /// The stages act on the log-probabilities of all tokens, which are not renormalized, as in Hugging Face's
    /// `_beam_search`.
    ///
    /// # Errors
    /// Returns [`SampleError`] if the row yields no token.
    pub(crate) fn continuations(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        history: &History,
        position: usize,
        count: usize,
    ) -> Result<Vec<Continuation>, SampleError> {
        let isa = self.isa;
        if self.candidates(logits, position)?.highest_logit() == f32::NEG_INFINITY {
            return Err(SampleError::NothingLeft { position, stage: MODEL });
        }
        let softmax = Softmax::of(isa, logits);
        self.logprobs.clear();
        self.logprobs.extend(logits.iter().map(|&logit| softmax.logprob(logit) as f32));
        let mut candidates = Candidates::new(isa, &self.logprobs, &mut self.buffers)
            .expect("log-probabilities of a valid row are valid");
        filter(&mut candidates, Context { params, history, mask: None, position }, None)?;
        let continuation = |candidate: super::candidates::Candidate| Continuation {
            token: candidate.id,
            logprob: candidate.logit.into(),
        };
        Ok(candidates.most_likely(count).into_iter().map(continuation).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn continuations(params: &SamplingParams, output: &[u32], count: usize) -> Result<Vec<(u32, f64)>, SampleError> {
        let logits = [1.0, 3.0, 2.0, 3.0, f32::NEG_INFINITY];
        let history = History::new(params, &[1], output);
        let found = Sampler::default().continuations(&logits, params, &history, 1 + output.len(), count)?;
        Ok(found.iter().map(|one| (one.token, one.logprob)).collect())
    }

    #[test]
    fn candidates_are_ordered_by_likelihood_then_id() {
        let sum: f64 = [1.0_f64, 3.0, 2.0, 3.0].iter().map(|logit| logit.exp()).sum();
        let logprob = |logit: f64| f64::from((logit - sum.ln()) as f32);
        let plain = SamplingParams::default();
        let all = [(1, logprob(3.0)), (3, logprob(3.0)), (2, logprob(2.0)), (0, logprob(1.0))];
        assert_eq!(continuations(&plain, &[], 9).unwrap(), all);
        assert_eq!(continuations(&plain, &[], 1).unwrap(), all[..1]);
        // Penalties act on log-probabilities, which are negative, so a repeated token's is multiplied by three.
        let penalty = SamplingParams { repetition_penalty: 3.0, ..SamplingParams::default() };
        let found = continuations(&penalty, &[3], 2).unwrap();
        assert_eq!(found, [(2, logprob(2.0)), (1, f64::from((logprob(3.0) * 3.0) as f32))]);
    }

    #[test]
    fn forbidden_tokens_are_not_candidates() {
        let allowed =
            |ids: &[u32]| SamplingParams { allowed_token_ids: Some(ids.to_vec()), ..SamplingParams::default() };
        assert_eq!(continuations(&allowed(&[0, 4]), &[], 5).unwrap().len(), 1);
        let refused = continuations(&allowed(&[4]), &[], 5).unwrap_err();
        assert_eq!(refused, SampleError::NothingLeft { position: 1, stage: "allowed_token_ids" });
        let rows = [[f32::NEG_INFINITY; 2], [0.0, f32::NAN]];
        let found = rows.map(|row| {
            let params = SamplingParams::default();
            Sampler::default().continuations(&row, &params, &History::new(&params, &[0], &[]), 1, 1).unwrap_err()
        });
        assert_eq!(found[0], SampleError::NothingLeft { position: 1, stage: MODEL });
        assert!(matches!(found[1], SampleError::NotFinite { count: 1, token: 1, .. }));
    }
}
