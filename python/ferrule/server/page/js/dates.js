// Groups of conversations by the day of their last message, in local time.

const LATEST_DAYS = ["Today", "Yesterday"];
const PERIODS = [7, 30];
const MONTH = new Intl.DateTimeFormat("en", { month: "long", year: "numeric" });
const DAY_MILLISECONDS = 86_400_000;

/** Returns the name of the group of a time, in milliseconds like `now`. */
export function dateGroup(time, now = Date.now()) {
  // Rounded, because a day with a change of the clock has 23 or 25 hours. A clock that was ahead counts as today.
  const days = Math.max(0, Math.round((midnight(now) - midnight(time)) / DAY_MILLISECONDS));
  const period = PERIODS.find((each) => days <= each);
  return LATEST_DAYS[days] ?? (period ? `Previous ${period} days` : MONTH.format(time));
}

function midnight(time) {
  return new Date(time).setHours(0, 0, 0, 0);
}
