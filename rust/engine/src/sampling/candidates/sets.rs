//! What keeps tokens that are no prefix of the order by likelihood, or looks at each of them.

use super::*;

impl Candidates<'_> {
    /// Every token that has not been dropped, ids ascending, with its logit as stages see it.
    pub fn left(&self) -> impl Iterator<Item = Candidate> {
        let places = self.blocks_left().flatten();
        let all = places.map(|place| Candidate { id: self.id_at(place), logit: self.logits()[place] });
        all.filter(|raw| self.is_left(raw.id, raw.logit)).map(|raw| Candidate { logit: self.seen(raw.logit), ..raw })
    }

    /// The `count` most likely of what is left, most likely first.
    pub fn first(&self, count: usize) -> Vec<Candidate> {
        let mut maxima = self.room.maxima.clone();
        let lowest = nth_highest(&mut maxima, count).map_or(f32::NEG_INFINITY, |lowest| self.seen(lowest));
        let mut first: Vec<Candidate> = self.left().filter(|candidate| candidate.logit >= lowest).collect();
        if count < first.len() {
            first.select_nth_unstable_by(count, by_likelihood);
            first.truncate(count);
        }
        first.sort_unstable_by(by_likelihood);
        first
    }

    /// Tokens of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.models.len()
    }

    /// Drops what does not pass. The order by likelihood does not matter.
    pub fn retain(&mut self, passes: impl Fn(Candidate) -> bool) {
        let kept: Vec<Candidate> = self.left().filter(|candidate| passes(*candidate)).collect();
        self.list_these(&kept);
    }

    /// Drops all but the tokens of these ids, which ascend.
    pub fn keep_only(&mut self, ids: &[u32]) {
        let kept: Vec<Candidate> =
            ids.iter().filter_map(|&id| Some(Candidate { id, logit: self.logit(id)? })).collect();
        self.list_these(&kept);
    }

    /// Lets `write` change the logits of all tokens, those of dropped ones being negative infinity. They are not
    /// checked: see [`Candidates::check_sound`].
    pub fn rewrite<E>(&mut self, write: impl FnOnce(&mut [f32]) -> Result<(), E>) -> Result<(), E> {
        let mut logits = std::mem::take(&mut self.room.other_logits);
        logits.clear();
        logits.resize(self.models.len(), f32::NEG_INFINITY);
        for candidate in self.left() {
            logits[candidate.id as usize] = candidate.logit;
        }
        write(&mut logits)?;
        self.room.other_logits = std::mem::replace(&mut self.room.logits, logits);
        self.row = Row::Changed;
        self.begin_anew();
        Ok(())
    }

    /// Whether no logit is NaN or positive infinity.
    ///
    /// # Errors
    /// The first token whose logit is.
    pub fn check_sound(&self) -> Result<(), u32> {
        let bad = self.logits().iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY);
        bad.map_or(Ok(()), |place| Err(self.id_at(place)))
    }

    /// Divides by the temperature what has only been noted to be divided.
    pub fn divide_now(&mut self) {
        self.apply_temperature();
    }

    /// Makes a shorter row of tokens whose ids ascend.
    fn list_these(&mut self, kept: &[Candidate]) {
        self.room.logits.clear();
        self.room.logits.extend(kept.iter().map(|candidate| candidate.logit));
        self.room.ids.clear();
        self.room.ids.extend(kept.iter().map(|candidate| candidate.id));
        self.row = Row::Listed;
        self.begin_anew();
    }

    /// Takes note of what all that is left weighs, before a stage drops of it.
    pub fn remember_total(&mut self, total: f64) {
        self.remembered_total = Some(total);
    }
}

impl Room {
    /// The entropy of a row of raw logits, in nats.
    pub fn entropy(&mut self, isa: Isa, logits: &[f32]) -> f64 {
        let highest = highest(logits);
        logits::weigh(isa, logits, highest, &mut self.weights, &mut self.sums);
        let (weights, sums, last) = (&self.weights[..], &self.sums[..], ANY);
        Weighed { isa, ids: None, logits, highest, weights, sums, last, remembered_total: None }.entropy()
    }
}

impl<'a> Weighed<'a> {
    /// Ids, ascending, logits and weights of what is left.
    pub fn left_at(self) -> impl Iterator<Item = (u32, f32, f64)> + use<'a> {
        let all = (0..self.logits.len()).map(move |place| (self.candidate(place), self.weights[place]));
        all.filter(move |(candidate, _)| by_likelihood(candidate, &self.last).is_le())
            .map(|(candidate, weight)| (candidate.id, candidate.logit, weight))
    }

    /// The entropy of what is left, in nats.
    pub fn entropy(self) -> f64 {
        let total = self.total();
        let highest = f64::from(self.highest);
        // What is so unlikely that it weighs nothing may be infinitely far away.
        let left = self.left_at().filter(|&(_, _, weight)| weight > 0.0);
        let below: f64 = left.map(|(_, logit, weight)| weight * (highest - f64::from(logit))).sum();
        total.ln() + below / total
    }
}
