//! Operations that keep sets other than prefixes of the order by likelihood, or visit every token.

use super::*;

impl Candidates<'_> {
    /// Returns the remaining tokens, ids ascending, with their logits after the pending temperature.
    pub fn remaining(&self) -> impl Iterator<Item = Candidate> {
        let places = self.remaining_blocks().flatten();
        let all = places.map(|index| Candidate { id: self.id_at(index), logit: self.logits()[index] });
        all.filter(|raw| self.is_remaining(raw.id, raw.logit))
            .map(|raw| Candidate { logit: self.scaled(raw.logit), ..raw })
    }

    /// Returns the `count` most likely remaining tokens, most likely first.
    pub fn first(&self, count: usize) -> Vec<Candidate> {
        let mut maxima = self.buffers.maxima.clone();
        let lowest = nth_highest(&mut maxima, count).map_or(f32::NEG_INFINITY, |lowest| self.scaled(lowest));
        let mut first: Vec<Candidate> = self.remaining().filter(|candidate| candidate.logit >= lowest).collect();
        if count < first.len() {
            first.select_nth_unstable_by(count, by_likelihood);
            first.truncate(count);
        }
        first.sort_unstable_by(by_likelihood);
        first
    }

    /// Returns the vocabulary size.
    pub fn vocab_size(&self) -> usize {
        self.raw_logits.len()
    }

    /// Drops the tokens that do not pass, in any order of likelihood.
    pub fn retain(&mut self, passes: impl Fn(Candidate) -> bool) {
        let kept: Vec<Candidate> = self.remaining().filter(|candidate| passes(*candidate)).collect();
        self.select(&kept);
    }

    /// Keeps only the tokens of these ids, which ascend.
    pub fn keep_only(&mut self, ids: &[u32]) {
        let kept: Vec<Candidate> =
            ids.iter().filter_map(|&id| Some(Candidate { id, logit: self.logit(id)? })).collect();
        self.select(&kept);
    }

    /// Lets `write` change the logits of all tokens; dropped ones are negative infinity. The result is not validated:
    /// see [`Candidates::check_valid`].
    pub fn rewrite<E>(&mut self, write: impl FnOnce(&mut [f32]) -> Result<(), E>) -> Result<(), E> {
        let mut logits = std::mem::take(&mut self.buffers.other_logits);
        logits.clear();
        logits.resize(self.raw_logits.len(), f32::NEG_INFINITY);
        for candidate in self.remaining() {
            logits[candidate.id as usize] = candidate.logit;
        }
        write(&mut logits)?;
        self.buffers.other_logits = std::mem::replace(&mut self.buffers.logits, logits);
        self.row = Row::Dense;
        self.reset_pending();
        Ok(())
    }

    /// Checks that no logit is NaN or positive infinity.
    ///
    /// # Errors
    /// Returns the first token whose logit is.
    pub fn check_valid(&self) -> Result<(), u32> {
        let bad = self.logits().iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY);
        bad.map_or(Ok(()), |index| Err(self.id_at(index)))
    }

    /// Applies the pending temperature now.
    pub fn apply_pending_temperature(&mut self) {
        self.apply_temperature();
    }

    /// Replaces the row by selected tokens, whose ids ascend.
    fn select(&mut self, kept: &[Candidate]) {
        self.buffers.logits.clear();
        self.buffers.logits.extend(kept.iter().map(|candidate| candidate.logit));
        self.buffers.ids.clear();
        self.buffers.ids.extend(kept.iter().map(|candidate| candidate.id));
        self.row = Row::Sparse;
        self.reset_pending();
    }

    /// Records the total weight before a stage drops tokens.
    pub fn record_total(&mut self, total: f64) {
        self.recorded_total = Some(total);
    }
}

impl Buffers {
    /// Returns the entropy of a row of raw logits, in nats.
    pub fn entropy(&mut self, isa: Isa, logits: &[f32]) -> f64 {
        let highest = highest(logits);
        logits::weigh(isa, logits, highest, &mut self.weights, &mut self.sums);
        let (weights, sums, last) = (&self.weights[..], &self.sums[..], NO_CUTOFF);
        Weighted { isa, ids: None, logits, highest, weights, sums, last, recorded_total: None }.entropy()
    }
}

impl<'a> Weighted<'a> {
    /// Returns ids (ascending), logits and weights of the remaining tokens.
    pub fn remaining_with_logits(self) -> impl Iterator<Item = (u32, f32, f64)> + use<'a> {
        let all = (0..self.logits.len()).map(move |index| (self.candidate(index), self.weights[index]));
        all.filter(move |(candidate, _)| by_likelihood(candidate, &self.last).is_le())
            .map(|(candidate, weight)| (candidate.id, candidate.logit, weight))
    }

    /// Returns the entropy of the remaining tokens, in nats.
    pub fn entropy(self) -> f64 {
        let total = self.total();
        let highest = f64::from(self.highest);
        // Tokens with zero weight may be at infinite distance.
        let left = self.remaining_with_logits().filter(|&(_, _, weight)| weight > 0.0);
        let below: f64 = left.map(|(_, logit, weight)| weight * (highest - f64::from(logit))).sum();
        total.ln() + below / total
    }
}
