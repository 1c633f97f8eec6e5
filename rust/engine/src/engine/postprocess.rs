//! Postprocessing of a forward pass: sample tokens, cache full pages, finish requests.

use std::collections::BTreeSet;
use std::slice::ChunksExact;

use ferrule_model::LanguageModel;

use super::Engine;
use super::step::wanted_logits;
use crate::beams;
use crate::sampling::{Sample, SampleError, Sampler};
use crate::scheduler::Scheduled;
use crate::sequence::Sequence;
use crate::structured::{Constraint, Next};
use crate::{FinishReason, Metrics, StepOutput, TokenLogprobs};

impl<M: LanguageModel> Engine<M> {
    /// Updates computed counts, samples tokens, caches full pages, and removes finished requests. `self.logits` has the
    /// logits of the chunks. Returns the step's outputs.
    pub(super) fn postprocess(&mut self, chunks: &[Scheduled]) -> Vec<StepOutput> {
        let vocab_size = self.model.vocab_size();
        let logits = std::mem::take(&mut self.logits);
        let mut rest = logits.as_slice();
        let mut outputs = Vec::new();
        let mut beam_searches = BTreeSet::new();
        for &chunk in chunks {
            let sequence = &mut self.scheduler.running[chunk.index];
            let count = wanted_logits(sequence, sequence.computed, &chunk).of(chunk.rows()).len();
            let (rows, after) =
                rest.split_at_checked(count * vocab_size).expect("one row of logits per requested position");
            rest = after;
            let begin = sequence.computed;
            sequence.computed += chunk.count;
            sequence.record_prefill();
            self.metrics.computed_tokens += chunk.rows() as u64;
            if sequence.timing.first_token.is_none() && sequence.computed >= sequence.prompt_len {
                self.metrics.record_prompt(sequence.prompt_len, &sequence.timing);
            }
            let rows = rows.chunks_exact(vocab_size);
            let mut output = None;
            let mut error = None;
            if sequence.beam.is_some() {
                error = rows.last().and_then(|row| beams::expand_beam(sequence, row, &mut self.sampler));
                beam_searches.insert(sequence.id);
            } else if rows.len() > 0 {
                let new = advance(sequence, rows, &mut self.sampler, self.limits.tokens(), &mut self.metrics);
                if let Some(FinishReason::Sampling(found)) = &new.finish {
                    error = Some(found.clone());
                }
                output = Some(new);
            } else if sequence.params.prompt_progress && sequence.timing.first_token.is_none() {
                output = Some(StepOutput::empty(sequence));
            }
            let pages = &mut self.scheduler.kv_cache;
            let end = begin + chunk.rows();
            sequence.computed = pages.keep_states(&mut sequence.tables, begin, end, sequence.computed);
            if chunk.drafts > 0 {
                pages.release_beyond(&mut sequence.tables, sequence.computed);
            }
            if let Some(SampleError::NotFinite { .. }) = error {
                // The cause of the invalid logits may be in the pages: they must not be reused.
                pages.invalidate(&mut sequence.tables);
            } else {
                let (prompt_len, computed) = (sequence.prompt_len, sequence.computed);
                let (tables, keys) = sequence.pages_and_keys();
                for new_pages in pages.cache_full_pages(tables, keys, prompt_len, computed) {
                    pages.write_to_disk(&mut sequence.tables, &new_pages, &self.model);
                }
            }
            outputs.extend(output);
        }
        outputs.extend(self.searches.advance(&beam_searches, &mut self.scheduler, &mut self.metrics));
        for output in &outputs {
            let Some(reason) = &output.finish else { continue };
            self.metrics.requests_finished.record(reason);
            self.scheduler.remove(output.request);
            self.speculator.release(|other| other == output.request);
        }
        self.logits = logits;
        outputs
    }
}

/// Collects prompt log-probabilities and samples tokens from a sequence's rows: one token, plus one per accepted draft.
/// Returns the request's output.
fn advance(
    sequence: &mut Sequence,
    rows: ChunksExact<'_, f32>,
    sampler: &mut Sampler,
    max_total_tokens: usize,
    metrics: &mut Metrics,
) -> StepOutput {
    let mut output = StepOutput::empty(sequence);
    let drafted = sequence.drafts.tokens().len();
    let prompt_rows = rows.len() - 1 - drafted;
    if let Err(error) = collect_prompt_logprobs(sequence, rows.clone(), sampler, &mut output.prompt_logprobs) {
        output.finish = Some(FinishReason::Sampling(error));
        return output;
    }
    if sequence.pending() > 0 {
        return output;
    }
    let mut accepted = 0;
    for row in rows.skip(prompt_rows) {
        match sample(sequence, row, sampler) {
            Err(reason) => output.finish = Some(reason),
            Ok(Sample { token, logprobs, entropy, trace }) => {
                let since_last = sequence.push(token);
                output.token_ids.push(token);
                output.logprobs.extend(logprobs);
                output.entropies.extend(entropy);
                output.trace.extend(trace);
                if sequence.params.is_stop(token) {
                    output.finish = Some(FinishReason::Stop { token });
                } else if let Some(reason) =
                    sequence.constraint.as_mut().and_then(|constraint| constraint.consume(token))
                {
                    output.finish = Some(reason);
                } else if sequence.output_len() >= sequence.params.max_tokens
                    || sequence.tokens.len() >= max_total_tokens
                {
                    output.finish = Some(FinishReason::Length);
                }
                metrics.record_token(since_last, &sequence.timing, output.finish.is_some());
                // An accepted draft already has its keys and values in the cache.
                let is_accepted = sequence.drafts.tokens().get(accepted) == Some(&token);
                accepted += usize::from(is_accepted);
                sequence.computed += usize::from(is_accepted);
                if !is_accepted {
                    break;
                }
            }
        }
        if output.finish.is_some() {
            break;
        }
    }
    sequence.record_drafts(accepted);
    metrics.drafted_tokens += drafted as u64;
    metrics.accepted_tokens += accepted as u64;
    output.timing = sequence.timing;
    output
}

/// Samples the next token of a sequence, or returns the reason why it finishes.
fn sample(sequence: &mut Sequence, row: &[f32], sampler: &mut Sampler) -> Result<Sample, FinishReason> {
    let Sequence { constraint, params, history, tokens, .. } = sequence;
    let mask = match constraint.as_mut().map(Constraint::next).transpose().map_err(FinishReason::Constraint)? {
        Some(Next::End) => return Err(FinishReason::Complete),
        Some(Next::Tokens(mask)) => Some(mask),
        None => None,
    };
    sampler.sample(row, params, history, mask, tokens.len()).map_err(FinishReason::Sampling)
}

/// Appends the log-probabilities of the prompt tokens that the chunk's rows predict.
fn collect_prompt_logprobs(
    sequence: &mut Sequence,
    rows: ChunksExact<'_, f32>,
    sampler: &mut Sampler,
    logprobs: &mut Vec<TokenLogprobs>,
) -> Result<(), SampleError> {
    if !sequence.wants_prompt_logprobs() {
        return Ok(());
    }
    let count = sequence.params.prompt_logprobs.unwrap_or(0);
    // The row at a position predicts the token after it.
    let first = sequence.computed + 1 - rows.len();
    for (row, position) in rows.zip(first..) {
        if position == sequence.next_prompt_logprob && sequence.wants_prompt_logprobs() {
            logprobs.push(sampler.logprobs(row, sequence.tokens[position], count, position)?);
            sequence.next_prompt_logprob += 1;
        }
    }
    Ok(())
}
