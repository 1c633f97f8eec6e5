//! Running acceptance rate of a draft source.

/// Decay per verified token: about the last 25 tokens count.
const DECAY: f64 = 0.96;
/// Number of verified tokens that the prior counts as.
const EXPECTED_WEIGHT: f64 = 2.0;
/// Steps without drafts after which one is probed, and the upper bound to which the interval doubles while probes are
/// rejected.
const PROBE_INTERVAL: u32 = 16;
const MAX_PROBE_INTERVAL: u32 = 256;

/// Running acceptance rate with exponential decay.
#[derive(Debug)]
pub(super) struct Acceptance {
    expected: f64,
    accepted: f64,
    verified: f64,
    /// Steps without drafts since the last draft.
    steps_without_drafts: u32,
    probe_interval: u32,
}

impl Acceptance {
    /// Starts from an expected rate.
    pub fn new(expected: f64) -> Self {
        let verified = EXPECTED_WEIGHT;
        Self {
            expected,
            accepted: verified * expected,
            verified,
            steps_without_drafts: 0,
            probe_interval: PROBE_INTERVAL,
        }
    }

    /// Returns the acceptance rate: the probability that a draft is accepted if all before it are.
    pub fn rate(&self) -> f64 {
        self.accepted / self.verified
    }

    /// Records a step in which the first `accepted` of `drafted` drafts were accepted.
    pub fn record(&mut self, drafted: usize, accepted: usize) {
        if accepted > 0 && self.steps_without_drafts > 0 {
            // An accepted probe means that the text has changed, so the old rate no longer counts.
            *self = Self::new(self.expected);
        }
        self.steps_without_drafts = 0;
        // Drafts after the first rejected one were not verified.
        for index in 0..drafted.min(accepted + 1) {
            self.verified = self.verified * DECAY + 1.0;
            self.accepted = self.accepted * DECAY + f64::from(u8::from(index < accepted));
        }
    }

    /// Records a step without drafts. Returns whether to probe one draft in this step.
    pub fn skip_step(&mut self) -> bool {
        self.steps_without_drafts += 1;
        let is_probe = self.steps_without_drafts >= self.probe_interval;
        if is_probe {
            self.probe_interval = (self.probe_interval * 2).min(MAX_PROBE_INTERVAL);
        }
        is_probe
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_follows_accepted_drafts() {
        let mut acceptance = Acceptance::new(0.7);
        assert!((acceptance.rate() - 0.7).abs() < 1e-9);
        (0..200).for_each(|_| acceptance.record(8, 0));
        assert!(acceptance.rate() < 0.01, "{}", acceptance.rate());
        // Three of four verified tokens are accepted, then all of eight.
        (0..200).for_each(|_| acceptance.record(8, 3));
        assert!((acceptance.rate() - 0.75).abs() < 0.05, "{}", acceptance.rate());
        (0..200).for_each(|_| acceptance.record(8, 8));
        assert!(acceptance.rate() > 0.95, "{}", acceptance.rate());
    }

    #[test]
    fn the_probe_interval_doubles_while_probes_are_rejected() {
        let mut acceptance = Acceptance::new(0.5);
        (0..50).for_each(|_| acceptance.record(1, 0));
        let mut probes = Vec::new();
        for step in 0..2000 {
            if acceptance.skip_step() {
                probes.push(step);
                acceptance.record(1, 0);
            }
        }
        let gaps: Vec<_> = probes.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(probes[0], 15);
        assert_eq!(gaps[..5], [32, 64, 128, 256, 256]);
        // An accepted probe resets the rate.
        while !acceptance.skip_step() {}
        acceptance.record(1, 1);
        assert!(acceptance.rate() > 0.6, "{}", acceptance.rate());
    }
}
