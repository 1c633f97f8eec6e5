//! How often the drafts of a source were accepted lately.

/// What a token tried is still worth when the next one is: some twenty-five count.
const DECAY: f64 = 0.96;
/// Tokens that the expectation counts as, at first.
const EXPECTED_WEIGHT: f64 = 2.0;
/// Steps without drafts after which one is tried, and the most that this grows to while none is accepted.
const PROBE_INTERVAL: u32 = 16;
const MAX_PROBE_INTERVAL: u32 = 256;

/// See the module.
#[derive(Debug)]
pub(super) struct Acceptance {
    expected: f64,
    accepted: f64,
    tried: f64,
    /// Steps since the last draft, if that one was a probe or none followed it.
    steps_without_drafts: u32,
    probe_interval: u32,
}

impl Acceptance {
    /// Before anything was tried.
    pub fn new(expected: f64) -> Self {
        let tried = EXPECTED_WEIGHT;
        Self { expected, accepted: tried * expected, tried, steps_without_drafts: 0, probe_interval: PROBE_INTERVAL }
    }

    /// The probability that a draft is accepted if all before it are.
    pub fn rate(&self) -> f64 {
        self.accepted / self.tried
    }

    /// Takes note of a step in which the first `accepted` of its drafts were accepted.
    pub fn record(&mut self, drafted: usize, accepted: usize) {
        if accepted > 0 && self.steps_without_drafts > 0 {
            // A probe: things have changed, and what was before says little.
            *self = Self::new(self.expected);
        }
        self.steps_without_drafts = 0;
        // Those behind the first that was not accepted were not tried.
        for index in 0..drafted.min(accepted + 1) {
            self.tried = self.tried * DECAY + 1.0;
            self.accepted = self.accepted * DECAY + f64::from(u8::from(index < accepted));
        }
    }

    /// Takes note of a step in which its drafts were not worth their rows; whether one is to be tried all the same.
    pub fn rest(&mut self) -> bool {
        self.steps_without_drafts += 1;
        let probes = self.steps_without_drafts >= self.probe_interval;
        if probes {
            self.probe_interval = (self.probe_interval * 2).min(MAX_PROBE_INTERVAL);
        }
        probes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_what_is_accepted() {
        let mut acceptance = Acceptance::new(0.7);
        assert!((acceptance.rate() - 0.7).abs() < 1e-9);
        (0..200).for_each(|_| acceptance.record(8, 0));
        assert!(acceptance.rate() < 0.01, "{}", acceptance.rate());
        // Of four tokens three were accepted, of eight all.
        (0..200).for_each(|_| acceptance.record(8, 3));
        assert!((acceptance.rate() - 0.75).abs() < 0.05, "{}", acceptance.rate());
        (0..200).for_each(|_| acceptance.record(8, 8));
        assert!(acceptance.rate() > 0.95, "{}", acceptance.rate());
    }

    #[test]
    fn what_is_never_accepted_is_probed_ever_more_rarely() {
        let mut acceptance = Acceptance::new(0.5);
        (0..50).for_each(|_| acceptance.record(1, 0));
        let mut probes = Vec::new();
        for step in 0..2000 {
            if acceptance.rest() {
                probes.push(step);
                acceptance.record(1, 0);
            }
        }
        let gaps: Vec<_> = probes.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(probes[0], 15);
        assert_eq!(gaps[..5], [32, 64, 128, 256, 256]);
        // Once one is accepted, all before is forgotten.
        while !acceptance.rest() {}
        acceptance.record(1, 1);
        assert!(acceptance.rate() > 0.6, "{}", acceptance.rate());
    }
}
